"""Paged caches that differ in the free list, the memory, the ids, forks, truncation or the types that they return."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from .simple_paged import BLOCKS, RELEASED, Paged

# Free lists.


class RandomFreeList(Paged):
    """Any free block is allocated next. The generator has a fixed seed (LAW-09)."""

    def make_free_list(self):
        self.random = np.random.default_rng(7)
        return list(range(self.total))

    def allocate(self):
        if not self.free:
            raise BLOCKS("none")
        return self.free.pop(self.random.integers(len(self.free)))


class OldestFreeBlockFirst(Paged):
    def make_free_list(self):
        return deque(range(self.total))

    def allocate(self):
        if not self.free:
            raise BLOCKS("none")
        return self.free.popleft()


class LowestFreeBlockFirst(Paged):
    """A bitmap of free blocks."""

    def make_free_list(self):
        return np.ones(self.total, bool)

    num_free_blocks = property(lambda self: int(self.free.sum()))

    def allocate(self):
        if not self.free.any():
            raise BLOCKS("none")
        block = int(self.free.argmax())
        self.free[block] = False
        return block

    def give_back(self, block):
        self.free[block] = True


class NeverUsedBlocksFirst(Paged):
    """A counter of blocks that were never used, and a free list that is used when the counter is at the end."""

    def make_free_list(self):
        return [0, []]

    num_free_blocks = property(lambda self: self.total - self.free[0] + len(self.free[1]))

    def allocate(self):
        if self.free[0] < self.total:
            self.free[0] += 1
            return self.free[0] - 1
        if not self.free[1]:
            raise BLOCKS("none")
        return self.free[1].pop(0)

    def give_back(self, block):
        self.free[1].append(block)


class ParkedUntilTheNextAllocation(Paged):
    """Freed blocks wait in a second list, counted as free, and are moved to the free list by the next allocation."""

    def make_free_list(self):
        return [list(range(self.total)), []]

    num_free_blocks = property(lambda self: len(self.free[0]) + len(self.free[1]))

    def allocate(self):
        ready, parked = self.free
        ready[:0], parked[:] = parked, []
        if not ready:
            raise BLOCKS("none")
        return ready.pop()

    def give_back(self, block):
        self.free[1].append(block)


class ParkedUntilSettle(Paged):
    """Freed blocks wait for the end of the steps in flight. They are neither counted as free nor allocated before."""

    def make_free_list(self):
        self.parked = []
        return super().make_free_list()

    def give_back(self, block):
        self.parked.append(block)

    def settle(self):
        self.free, self.parked = [*self.parked, *self.free], []


class NullBlock(Paged):
    """Block 0 is reserved: tables list it for released entries, and batches of tables are padded with it."""

    def make_free_list(self):
        return list(range(1, self.total + 1))

    def make_store(self):
        self.keys, self.values = np.full((2, (self.total + 1) * self.size, *self.row), np.nan, np.float32)

    def block_table(self, sequence, layer):
        return [max(block, 0) for block in super().block_table(sequence, layer)]

    def block_tables(self, sequences, layer):
        return np.maximum(super().block_tables(sequences, layer), 0)


class OneListPerLayer(Paged):
    """Each layer has a part of the pool, and borrows blocks from the fullest part when its own is empty."""

    def make_free_list(self):
        self.turn = 0
        return [list(range(layer, self.total, self.layers)) for layer in range(self.layers)]

    num_free_blocks = property(lambda self: sum(map(len, self.free)))

    def allocate(self):
        self.turn += 1
        part = self.free[self.turn % self.layers] or max(self.free, key=len)
        if not part:
            raise BLOCKS("none")
        return part.pop(0)

    def give_back(self, block):
        self.free[block % self.layers].append(block)


# Memory.


class BlocksInADictionary(Paged):
    """The memory of a block is allocated with the block and released with it."""

    def make_store(self):
        self.memory = {}

    def allocate(self):
        block = super().allocate()
        self.memory[block] = np.full((2, self.size, *self.row), np.nan, np.float32)
        return block

    def give_back(self, block):
        self.memory.pop(block, None)
        super().give_back(block)

    def put(self, layer, slots, keys, values):
        for slot, key, value in zip(slots, keys, values, strict=True):
            self.memory.setdefault(slot // self.size, np.full((2, self.size, *self.row), np.nan, np.float32))
            self.memory[slot // self.size][:, slot % self.size] = key, value

    def get(self, layer, slots):
        if not len(slots):
            return self.empty()
        return np.stack([self.memory[slot // self.size][:, slot % self.size] for slot in slots], 1)


class LayersMadeOnTheFirstWrite(Paged):
    """Each layer has memory of its own for the whole pool, which is allocated when the layer is written for the first time."""

    def make_store(self):
        self.memory = {}

    def memory_of(self, layer):
        if layer not in self.memory:
            self.memory[layer] = np.full((2, self.total * self.size, *self.row), np.nan, np.float32)
        return self.memory[layer]

    def put(self, layer, slots, keys, values):
        self.memory_of(layer)[:, slots] = keys, values

    def get(self, layer, slots):
        return self.memory_of(layer)[:, slots]


class TransposedValues(Paged):
    """Keys [heads, dim, slots] and values [slots, dim, heads]: the layouts of two different kernels."""

    def make_store(self):
        self.keys = np.zeros((*self.row, self.total * self.size), np.float32)
        self.values = np.zeros((self.total * self.size, *self.row[::-1]), np.float32)

    def put(self, layer, slots, keys, values):
        self.keys[..., slots], self.values[slots] = keys.transpose(1, 2, 0), values.transpose(0, 2, 1)

    def get(self, layer, slots):
        return self.keys[..., slots].transpose(2, 0, 1), self.values[slots].transpose(0, 2, 1)


class OneTensor(Paged):
    """Keys and values of a head are adjacent in one tensor; slots are stored last to first."""

    def make_store(self):
        self.memory = np.zeros((self.total * self.size, self.row[0], 2, self.row[1]), np.float32)[::-1]

    def put(self, layer, slots, keys, values):
        self.memory[slots, :, 0], self.memory[slots, :, 1] = keys, values

    def get(self, layer, slots):
        return self.memory[slots, :, 0], self.memory[slots, :, 1]


class MemoryDoubles(Paged):
    """The memory has room for the highest slot that was used, rounded up to a power of two, and never shrinks."""

    def make_store(self):
        self.memory = np.zeros((2, 0, *self.row), np.float32)

    def grow(self, slots):
        room = 1 << int(max(slots, default=0)).bit_length()
        if room > self.memory.shape[1]:
            larger = np.full((2, room, *self.row), np.inf, np.float32)
            larger[:, : self.memory.shape[1]] = self.memory
            self.memory = larger

    def put(self, layer, slots, keys, values):
        self.grow(slots)
        self.memory[:, slots] = keys, values

    def get(self, layer, slots):
        self.grow(slots)
        return self.memory[:, slots]


class WritesAreLogged(Paged):
    """A log of rows, and the index of the newest row of each slot. The log is compacted when it is twice as long as needed."""

    def make_store(self):
        self.log, self.newest = [], {}

    def put(self, layer, slots, keys, values):
        for slot, key, value in zip(map(int, slots), keys, values, strict=True):
            self.newest[slot] = len(self.log)
            self.log.append((np.array(key), np.array(value)))
        if len(self.log) > 2 * len(self.newest):
            self.log = [self.log[number] for number in self.newest.values()]
            self.newest = dict(zip(self.newest, range(len(self.log)), strict=True))

    def get(self, layer, slots):
        zeros = np.zeros(self.row, np.float32)
        rows = [self.log[self.newest[int(slot)]] if int(slot) in self.newest else (zeros, zeros) for slot in slots]
        return np.array(rows, np.float32).reshape(len(rows), 2, *self.row).swapaxes(0, 1)


class WritesWaitForARead(Paged):
    """Writes are queued, and executed before the next read."""

    def make_store(self):
        super().make_store()
        self.queue = []

    def put(self, layer, slots, keys, values):
        self.queue.append((slots, np.array(keys), np.array(values)))

    def get(self, layer, slots):
        for queued in self.queue:
            super().put(layer, *queued)
        self.queue.clear()
        return super().get(layer, slots)


class ImmutableMemory(Paged):
    """Every write makes a new array, as in JAX, and reads return read-only arrays."""

    def put(self, layer, slots, keys, values):
        self.keys, self.values = self.keys.copy(), self.values.copy()
        super().put(layer, slots, keys, values)

    def get(self, layer, slots):
        found = super().get(layer, slots)
        for part in found:
            part.flags.writeable = False
        return found


class FreedBlocksAreOverwritten(Paged):
    """A freed block is filled with NaN at once, as a debug allocator does."""

    def give_back(self, block):
        super().give_back(block)
        self.keys[block * self.size : (block + 1) * self.size] = np.nan


class Float16(Paged):
    stored = np.float16


class SlotsOfEachRequest(Paged):
    """No blocks: each sequence has a list of slots, which are blocks of one token."""

    def slots(self, sequence, layer, positions):
        return np.array([self.tables[sequence][position][layer] for position in positions], int)


# Ids.


class LargeIds(Paged):
    """Sequence ids are not consecutive, and beyond 2^32."""

    def new_id(self):
        self.begun += 1
        return (self.begun * 0x9E3779B97F4A7C15) % 2**53


class DescendingIds(Paged):
    def new_id(self):
        self.begun += 1
        return 10**6 - self.begun


class NumpyIds(Paged):
    """Ids, lengths, counts and tables are NumPy integers."""

    def new_id(self):
        return np.int64(super().new_id())

    def length(self, sequence, layer):
        return np.int32(super().length(sequence, layer))

    def block_table(self, sequence, layer):
        return np.array(super().block_table(sequence, layer), np.int32)

    def lengths(self, sequences, layer):
        return super().lengths(sequences, layer).astype(np.int32)

    def slot_mapping(self, sequence, layer, start, count):
        return np.array(super().slot_mapping(sequence, layer, start, count), np.int64)

    num_free_blocks = property(lambda self: np.uint32(len(self.free)))
    utilization = property(lambda self: np.float32(1 - len(self.free) / self.total if self.total else 0))


class Tuples(Paged):
    """Tables, slots and lengths are tuples."""

    def block_table(self, sequence, layer):
        return tuple(super().block_table(sequence, layer))

    def slot_mapping(self, sequence, layer, start, count):
        return tuple(super().slot_mapping(sequence, layer, start, count))

    def lengths(self, sequences, layer):
        return tuple(super().lengths(sequences, layer).tolist())

    def read(self, sequence, layer, positions):
        return list(super().read(sequence, layer, positions))


class BackwardStrides(Paged):
    """Reads return arrays with negative strides and in Fortran order."""

    def get(self, layer, slots):
        keys, values = super().get(layer, slots)
        return keys[::-1, :, ::-1].copy()[::-1, :, ::-1], np.asfortranarray(values)


# Forks and truncation.


class ForkCopiesPartlyFilledBlocks(Paged):
    """The last block of each layer is copied by `fork` itself if it is partly filled."""

    def forked_entries(self, sequence):
        entries = super().forked_entries(sequence)
        for layer, count in enumerate(self.counts[sequence]):
            if count % self.size:
                self.separate(entries[count // self.size], layer)
        return entries


class ForkLeavesEmptyBlocks(Paged):
    """The child's tables end with the blocks that have tokens."""

    def forked_entries(self, sequence):
        filled = -(-max(self.counts[sequence]) // self.size)
        entries = super().forked_entries(sequence)
        self.unlist(entries[filled:])
        return entries[:filled]


class TruncateKeepsEveryBlock(Paged):
    def kept_entries(self, sequence, length):
        return len(self.tables[sequence])


class TruncateKeepsOneBlockMore(Paged):
    def kept_entries(self, sequence, length):
        return super().kept_entries(sequence, length) + 1


class RemoveMovesWholeBlocks(Paged):
    """`remove` of whole blocks removes their entries, and moves no token."""

    def remove(self, sequence, start, stop, frequencies=None, layout="halves"):
        self.require(sequence)
        blocks = range(int(start) // self.size, int(stop) // self.size)
        whole = not start % self.size and not stop % self.size and self.first(sequence) <= start <= stop
        if frequencies is not None or not whole or stop > min(self.counts[sequence]):
            super().remove(sequence, start, stop, frequencies, layout)
            return
        table = self.tables[sequence]
        self.unlist(table[blocks.start : blocks.stop])
        self.tables[sequence] = table[: blocks.start] + table[blocks.stop :]
        self.counts[sequence] = [n - int(stop - start) for n in self.counts[sequence]]


class CopiesAreDelayed(Paged):
    """A copy of a shared block is queued, and made when the memory is used. Until then its source is not allocated again."""

    def make_store(self):
        super().make_store()
        self.copies = []

    def separate(self, entry, layer):
        own = self.allocate()
        self.copies.append((entry[layer], own))
        self.references.update([own])
        self.references[entry[layer]] -= 1
        entry[layer] = own

    def undo(self):
        self.run_copies()  # the copies of this call alone are undone
        return self.undoing()

    def undoing(self):
        from contextlib import contextmanager

        @contextmanager
        def both():
            try:
                with Paged.undo(self):
                    yield
            except BLOCKS:
                self.copies.clear()
                raise

        return both()

    def run_copies(self):
        slots = np.arange(self.size)
        for source, target in self.copies:
            pair = super().get(0, source * self.size + slots)
            super().put(0, target * self.size + slots, *pair)
        self.copies.clear()

    def put(self, layer, slots, keys, values):
        self.run_copies()
        super().put(layer, slots, keys, values)

    def get(self, layer, slots):
        self.run_copies()
        return super().get(layer, slots)


class OneTableForAllLayers(Paged):
    """One block id stands for a block in every layer."""

    def __init__(self, num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype):
        self.depth = num_layers
        super().__init__(num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype)
        self.depth = int(num_layers)

    def make_store(self):
        self.keys, self.values = np.zeros((2, self.layers, self.total * self.size, *self.row), np.float32)

    def put(self, layer, slots, keys, values):
        self.keys[layer, slots], self.values[layer, slots] = keys, values

    def get(self, layer, slots):
        return self.keys[layer, slots], self.values[layer, slots]

    def enlarge(self, num_tokens):
        more = {each: max(0, -(-tokens // self.size) - len(self.tables[each])) for each, tokens in num_tokens.items()}
        if sum(more.values()) > self.num_free_blocks:
            raise BLOCKS(f"{more}")
        for sequence, count in more.items():
            for _ in range(count):
                block = self.allocate()
                self.references.update([block])
                self.tables[sequence].append([block] * self.layers)

    def forked_entries(self, sequence):
        entries = [list(entry) for entry in self.tables[sequence]]
        self.references.update(entry[0] for entry in entries if entry[0] != RELEASED)
        return entries

    def separate(self, entry, layer):
        own, slots = self.allocate(), np.arange(self.size)
        self.keys[:, own * self.size + slots] = self.keys[:, entry[0] * self.size + slots]
        self.values[:, own * self.size + slots] = self.values[:, entry[0] * self.size + slots]
        self.references.update([own])
        self.references[entry[0]] -= 1
        entry[:] = [own] * self.layers

    def unlist(self, entries):
        super().unlist([entry[:1] for entry in entries])


class FewOperations:
    """Offers create, drop, write and gather only, by composition."""

    def __init__(self, **sizes):
        self._cache = Paged(**sizes)
        self.create, self.drop, self.gather = self._cache.create, self._cache.drop, self._cache.gather
        self.write = self._cache.write


class ForkIsACopy(Paged):
    """Has no `fork`, because its fork copies everything (SHARE-03 (c)): a harness does not offer it."""

    fork = None


class WindowedPool:
    """A batched cache with one sliding window in all layers. The engine calls `free_skipped` after a step (vLLM's name)."""

    window = 4

    def __init__(self, **sizes):
        self._pool = Paged(**sizes)

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def free_skipped(self, sequence, num_computed):
        """Free the blocks that no query after the first `num_computed` tokens sees."""
        self._pool.release_before(sequence, max(0, num_computed - self.window + 1))


class OneWindowInAllLayers:
    """The adapter of a WindowedPool. Its `attend` covers a window and is judged in the family `attention`."""

    def __init__(self, **sizes):
        self._cache = WindowedPool(**sizes)
        for name in ("create", "drop", "write", "append", "append_step", "length", "gather", "read", "block_table", "fork"):
            setattr(self, name, getattr(self._cache, name))

    num_free_blocks = property(lambda self: self._cache.num_free_blocks)

    def release_before(self, sequence, position):
        if not 0 <= position <= min(self._cache.counts.get(sequence, [0])):
            self._cache.release_before(sequence, position)  # raises
        self._cache.free_skipped(sequence, int(position) + self._cache.window - 1)


class OneWindowThatFreesTooMuch(OneWindowInAllLayers):
    """A wrong one: it frees the block that the first token of the window is in."""

    def release_before(self, sequence, position):
        super().release_before(sequence, min(int(position) + 1, min(self._cache.counts[sequence])))


LIMITS: dict[str, dict[str, object]] = {
    "Float16": {"dtype": "float16"},
    "SlotsOfEachRequest": {"block_size": 1},
    "ParkedUntilSettle": {"settle": True},
    "NullBlock": {"null_block": True},
    "OneTableForAllLayers": {"one_block_table": True},
}
DESIGNS: Sequence[type] = (
    RandomFreeList, OldestFreeBlockFirst, LowestFreeBlockFirst, NeverUsedBlocksFirst, ParkedUntilTheNextAllocation,
    ParkedUntilSettle, NullBlock, OneListPerLayer, BlocksInADictionary, LayersMadeOnTheFirstWrite, TransposedValues,
    OneTensor, MemoryDoubles, WritesAreLogged, WritesWaitForARead, ImmutableMemory, FreedBlocksAreOverwritten, Float16,
    SlotsOfEachRequest, LargeIds, DescendingIds, NumpyIds, Tuples, BackwardStrides, ForkCopiesPartlyFilledBlocks,
    ForkLeavesEmptyBlocks, TruncateKeepsEveryBlock, TruncateKeepsOneBlockMore, RemoveMovesWholeBlocks, CopiesAreDelayed,
    OneTableForAllLayers, FewOperations, ForkIsACopy, OneWindowInAllLayers,
)  # fmt: skip
