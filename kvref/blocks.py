"""The block pool and the block tables of a paged cache, as in PagedAttention.

A block is `block_size` consecutive slots of the key store and of the value store. The pool records which blocks are free. The
tables list, for each sequence and layer, the blocks that contain its tokens, in order.

All tables are segments of one integer array, so that a step of many sequences takes a few array operations, whatever their number
and lengths. A rectangular array [sequences, longest table] would make every sequence pay for the longest one.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.errors import BlockNotAllocated, OutOfBlocks, PositionOutOfRange, in_range, integer, whole

MOST_BLOCKS = 2**31 - 1  # block ids are int32, as kernels expect them

Blocks = Sequence[int] | NDArray[np.int32]


class BlockPool:
    """The allocator of `num_blocks` blocks with reference counts (chapters BLOCK and SHARE).

    Block ids are the integers in `[0, num_blocks)`. A block without references is free. In a paged cache the number of references
    of a block is the number of block tables that list it (LAW-03). A pool can have 0 blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks` free blocks. Raises ConfigError unless `num_blocks` is an integer in `[0, 2^31)`."""
        self.num_blocks = whole("num_blocks", num_blocks, minimum=0, maximum=MOST_BLOCKS)
        self._free = np.arange(self.num_blocks, dtype=np.int32)[::-1].copy()  # a stack; its first _num_free entries are valid
        self._num_free = len(self._free)
        self._references: NDArray[np.int32] = np.zeros(self.num_blocks + 1, np.int32)  # the last is for NO_BLOCK, always 0

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """The number of allocated blocks. A shared block counts once."""
        return self.num_blocks - self.num_free

    @property
    def utilization(self) -> float:
        """num_used / num_blocks; 0.0 for a pool of 0 blocks (BLOCK-06)."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    def allocate(self) -> int:
        """Allocate a free block, with one reference, and return its id (BLOCK-02). Raises OutOfBlocks if no block is free."""
        return int(self.allocate_many(1)[0])

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        """Allocate `count` free blocks, each with one reference, and return their ids, int32 [count] (BLOCK-07).

        If it raises, no block is allocated. Raises OutOfBlocks if fewer blocks are free, PositionOutOfRange if `count` is
        negative.
        """
        count = in_range(count, None, PositionOutOfRange, "count")
        if count > self.num_free:
            raise OutOfBlocks(f"out of blocks: {count} needed, {self.num_free} of {self.num_blocks} free")
        taken = self._take(count)
        self._references[taken] = 1
        return taken

    def share(self, block: int) -> None:
        """Add one reference to an allocated block. Raises BlockNotAllocated if the block is free or does not exist (SHARE-02)."""
        self.share_many([self._held("share", block)])

    def share_many(self, blocks: Blocks) -> None:
        """Add one reference to each of `blocks`, which must be different and allocated: this is not checked."""
        self._references[blocks] += 1

    def free(self, block: int) -> None:
        """Remove one reference from a block. Without references the block is free (SHARE-01).

        Raises BlockNotAllocated if the block is free already or does not exist: a block that is freed twice would be allocated to
        two owners (BLOCK-05).
        """
        self.free_many([self._held("free", block)])

    def free_many(self, blocks: Blocks) -> None:
        """Remove one reference from each of `blocks`, which must be different and allocated: this is not checked."""
        numbers = np.asarray(blocks, np.int32)
        self._references[numbers] -= 1
        self._give_back(numbers[self._references[numbers] == 0])

    def references(self, block: int) -> int:
        """Return the number of references to a block, 0 if it is free. Raises BlockNotAllocated if the block does not exist."""
        number = integer(block)
        if number is None or not 0 <= number < self.num_blocks:
            raise BlockNotAllocated(f"references: expected a block in [0, {self.num_blocks}), got {block!r}")
        return int(self._references[number])

    def shared(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return which of `blocks` have more than one reference: bool, in the shape of `blocks`. NO_BLOCK has none."""
        return np.asarray(self._references[blocks] > 1)

    def _held(self, operation: str, block: int) -> int:
        """`block` as a Python int. Raises BlockNotAllocated unless it is allocated."""
        number = integer(block)
        if number is None or not 0 <= number < self.num_blocks or not self._references[number]:
            raise BlockNotAllocated(f"{operation}: block {block!r} is not allocated")
        return number

    def _take(self, count: int) -> NDArray[np.int32]:
        """Remove `count` blocks from the free list and return them. There must be enough."""
        left = self._num_free - count
        taken = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        return taken

    def _give_back(self, blocks: NDArray[np.int32]) -> None:
        """Return blocks without references to the free list."""
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)


# In a table: the entry was released, or the table ends before it. The slots of NO_BLOCK are negative, never written (KERN-02).
NO_BLOCK = -1


class BlockTables:
    """The block tables of many sequences, and the lengths of their layers. A table is identified by its number.

    A table is a list of entries. An entry consists of `num_layers` block ids, one per layer: position p of a layer is in entry
    p // block_size (PAGED-06). The ids of all layers are adjacent because a step looks up the same entry in every layer. The
    arrays that describe the tables are indexed by table number:

    - `counts`, int64 [tables]: entries in the table;
    - `released`, int64 [tables, num_layers]: of these, the number of first entries whose blocks were released (WIN-09);
    - `lengths`, int64 [tables, num_layers]: tokens written.

    All tables are segments of one array. A table that outgrows its segment moves to a segment twice as long at the end of the
    array, and leaves a gap. When the array is full, all tables are copied without gaps to a new array of about twice their size.
    Each segment has at least one entry more than its table. This entry lists NO_BLOCK, so that `at` can read one past the end.
    """

    def __init__(self, num_layers: int, block_size: int) -> None:
        """Create an empty collection. Raises ConfigError unless both sizes are integers of at least 1."""
        self.num_layers = whole("num_layers", num_layers)
        self.block_size = whole("block_size", block_size)
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self.released: NDArray[np.int64] = np.zeros((0, self.num_layers), np.int64)
        self.lengths: NDArray[np.int64] = np.zeros((0, self.num_layers), np.int64)
        self._entries: NDArray[np.int32] = np.full(self.num_layers, NO_BLOCK, np.int32)  # the first entry serves all empty tables
        self._end = self.num_layers  # of the used part of _entries
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)  # index of each table's segment in _entries
        self._rooms: NDArray[np.int64] = np.zeros(0, np.int64)  # length of each segment, with the additional entry
        self._closed: list[int] = []  # numbers without a table

    def open(self) -> int:
        """Create an empty table, for a new sequence, and return its number. Numbers of closed tables are used again."""
        if not self._closed:
            tables = len(self.counts)
            more = max(8, tables)
            self.counts, self._starts, self._rooms, self.released, self.lengths = (
                np.concatenate([each, np.zeros((more, *each.shape[1:]), np.int64)])
                for each in (self.counts, self._starts, self._rooms, self.released, self.lengths)
            )
            self._closed = list(reversed(range(tables, tables + more)))
        return self._closed.pop()

    def fork(self, table: int) -> int:
        """Create a table with the same entries and lengths as `table`, and return its number. References are not changed."""
        new = self.open()
        self.append(new, self._segment(table).copy())
        self.lengths[new], self.released[new] = self.lengths[table], self.released[table]
        return new

    def close(self, table: int) -> NDArray[np.int32]:
        """Remove a table, and return the blocks that it listed, the last entry first: int32 [n]."""
        held = self.cut(table, 0)
        self.lengths[table], self._starts[table], self._rooms[table] = 0, 0, 0
        self._closed.append(table)
        return held

    def extend(self, more: Mapping[int, int], blocks: NDArray[np.int32]) -> None:
        """Append new entries to several tables. more: the number of new entries, by table.

        blocks: int32, num_layers blocks per new entry. Of each table, they are in the order of the layers, and the entries of a
        layer are adjacent.
        """
        begin = 0
        for table, count in more.items():
            size = count * self.num_layers
            self.append(table, blocks[begin : begin + size].reshape(self.num_layers, count).T)
            begin += size

    def append(self, table: int, entries: NDArray[np.int32]) -> None:
        """Append entries, int32 [count, num_layers], to a table."""
        used, size = int(self.counts[table]) * self.num_layers, entries.size
        if used + size >= self._rooms[table]:
            self._move(table, max(used + size + self.num_layers, 2 * int(self._rooms[table])))
        at = int(self._starts[table]) + used
        self._entries[at : at + size] = entries.reshape(-1)
        self.counts[table] += len(entries)

    def cut(self, table: int, count: int) -> NDArray[np.int32]:
        """Remove all entries but the first `count`, and return the blocks that they listed, the last entry first: int32 [n]."""
        past = self._segment(table)[count:]
        reverse = past[::-1].reshape(-1)
        rest: NDArray[np.int32] = reverse[reverse != NO_BLOCK]
        past[:] = NO_BLOCK
        self.counts[table] = min(count, int(self.counts[table]))
        self.released[table] = np.minimum(self.released[table], count)
        return rest

    def before(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the blocks that the first `counts` entries of a table list: int32 [n]. counts: one number, or one per layer."""
        part, held = self._before(table, counts)
        return part[held]

    def release(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """Replace the blocks of the first `counts` entries by NO_BLOCK; return them, the last entry first: int32 [n] (WIN-09).

        counts: one number, or one per layer. The entries keep their indices.
        """
        part, held = self._before(table, counts)
        blocks = part[::-1][held[::-1]]
        part[held] = NO_BLOCK
        self.released[table] = np.maximum(self.released[table], counts)
        return blocks

    def first(self, tables: Array) -> Array:
        """Return the first position not released, per layer: [num_layers] for one table, [n, num_layers] for several."""
        return self.released[tables] * self.block_size

    def replace(self, table: int, layer: int, entry: int, block: int) -> int:
        """Set the block of an entry in one layer, and return the block that it listed before."""
        segment = self._segment(table)
        before, segment[entry, layer] = int(segment[entry, layer]), block
        return before

    def blocks(self, table: int, layer: int) -> list[int]:
        """Return the block ids of a layer, in the order of the entries; NO_BLOCK for released entries."""
        held: list[int] = self._segment(table)[:, layer].tolist()
        return held

    def held(self, table: int) -> NDArray[np.int32]:
        """Return the blocks that a table lists in all layers, without NO_BLOCK: int32 [n]."""
        listed = self._segment(table).reshape(-1)
        held: NDArray[np.int32] = listed[listed != NO_BLOCK]
        return held

    def at(self, tables: Array, layers: Array, entries: Array) -> NDArray[np.int32]:
        """Return the blocks of entries, int32; NO_BLOCK for the entry after a table's last. The arguments broadcast."""
        found: NDArray[np.int32] = self._entries.take(self._starts[tables] + layers + entries * self.num_layers)
        return found

    def padded(self, tables: NDArray[np.int64], layer: int) -> NDArray[np.int32]:
        """Return `blocks` of several tables as int32 [tables, most entries of any], with NO_BLOCK past the end of each table."""
        ends = self.counts[tables] * self.num_layers
        places = np.minimum(np.arange(0, ends.max(initial=0), self.num_layers), ends[:, None])  # or the additional entry
        places += (self._starts[tables] + layer)[:, None]
        return self._entries.take(places)

    def entries_for(self, num_tokens: Array) -> Array:
        """Return ceil(num_tokens / block_size), the entries that num_tokens tokens need (PAGED-03). An integer or an array."""
        return -(-num_tokens // self.block_size)

    def capacity(self, table: int) -> int:
        """Return the number of tokens for which the table has entries: counts * block_size."""
        return int(self.counts[table]) * self.block_size

    def slots(self, tables: Array, layers: Array, positions: Array) -> NDArray[np.int64]:
        """Return the slots of positions within the capacity, int64 (PAGED-06). The arguments broadcast against each other."""
        entry = positions // self.block_size
        blocks = self.at(tables, layers, entry)
        slots: NDArray[np.int64] = (blocks - entry) * self.block_size + positions  # offset = positions - entry * block_size
        return slots

    def _segment(self, table: int) -> NDArray[np.int32]:
        """A view of a table's entries, [count, num_layers]: writing to it changes the table."""
        start = self._starts[table]
        stop = start + self.counts[table] * self.num_layers
        return self._entries[start:stop].reshape(-1, self.num_layers)

    def _before(self, table: int, counts: int | NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Entries that include the first `counts` which are not released, and a mask of these: [n, num_layers] both."""
        released = self.released[table]
        begin = int(released.min(where=counts > released, initial=self.counts[table]))
        entries = np.arange(begin, max(begin, np.max(counts)))[:, None]
        return self._segment(table)[begin : begin + len(entries)], (released <= entries) & (entries < counts)

    def _move(self, table: int, room: int) -> None:
        """Move a table to a new segment of length `room` at the end."""
        if self._end + room > len(self._entries):
            self._close_up(room)
        held = self._segment(table)
        self._starts[table], self._rooms[table] = self._end, room
        self._end += room
        self._segment(table)[:] = held

    def _close_up(self, room: int) -> None:
        """Copy the tables without gaps to a new array, of twice the length they take plus `room`."""
        ends = self.num_layers + np.cumsum(self._rooms)
        starts, end = np.where(self._rooms, ends - self._rooms, 0), int(ends[-1])
        entries = np.full(2 * end + room, NO_BLOCK, np.int32)
        entries[self.num_layers : end] = self._entries[
            np.arange(self.num_layers, end) + np.repeat(self._starts - starts, self._rooms)
        ]
        self._starts, self._entries, self._end = starts, entries, end
