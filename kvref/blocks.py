"""Blocks of slots, handed out and taken back: the pool and the tables that PagedAttention stands on.

A block is `block_size` consecutive slots of the key and the value store. The pool knows which blocks are free; the tables list,
for each sequence and layer, which blocks hold its tokens, in order. All tables lie one after the other in one integer array, so
that a step of many sequences is a few operations on arrays, however many there are and however long, and a long one costs the
others nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.errors import BlockNotAllocated, OutOfBlocks, PositionOutOfRange, in_range, integer, whole

MOST_BLOCKS = 2**31 - 1  # a table holds int32, as kernels take it

Blocks = Sequence[int] | NDArray[np.int32]


class BlockPool:
    """`num_blocks` blocks, each with as many references as tables list it, and free at none (LAW-03, SHARE-01).

    A pool of no blocks is allowed (BLOCK-06).
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises ConfigError."""
        self.num_blocks = whole("num_blocks", num_blocks, minimum=0, maximum=MOST_BLOCKS)
        self._free = np.arange(self.num_blocks, dtype=np.int32)[::-1].copy()  # a stack, of which num_free are there
        self._num_free = len(self._free)
        self._references: NDArray[np.int32] = np.zeros(self.num_blocks + 1, np.int32)  # and none of NO_BLOCK, the last

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def utilization(self) -> float:
        """used / total in [0, 1]; 0.0 for a pool of none."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    def allocate(self) -> int:
        """A free block, with one reference from now on. Raises OutOfBlocks when none is free."""
        return int(self.allocate_many(1)[0])

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        """`count` free blocks, int32 [count], or none of them (BLOCK-07).

        Raises OutOfBlocks when fewer are free, PositionOutOfRange for a negative count (LAW-19).
        """
        count = in_range(count, None, PositionOutOfRange, "count")
        if count > self.num_free:
            raise OutOfBlocks(f"out of blocks: {count} needed, {self.num_free} of {self.num_blocks} free")
        taken = self._take(count)
        self._references[taken] = 1
        return taken

    def share(self, block: int) -> None:
        """One reference more. Raises BlockNotAllocated for a block without any (SHARE-02)."""
        self.share_many([self._held("share", block)])

    def share_many(self, blocks: Blocks) -> None:
        """One reference more for each of several blocks that are held, all different."""
        self._references[blocks] += 1

    def free(self, block: int) -> None:
        """One reference less; without any the block is free.

        Raises BlockNotAllocated unless it is held: a block freed twice would get two owners (BLOCK-05).
        """
        self.free_many([self._held("free", block)])

    def free_many(self, blocks: Blocks) -> None:
        """One reference less for each of several blocks that are held, all different."""
        numbers = np.asarray(blocks, np.int32)
        self._references[numbers] -= 1
        self._give_back(numbers[self._references[numbers] == 0])

    def references(self, block: int) -> int:
        """How often a block is held, 0 for a free one. Raises BlockNotAllocated for one that is not of this pool."""
        number = integer(block)
        if number is None or not 0 <= number < self.num_blocks:
            raise BlockNotAllocated(f"references: expected a block in [0, {self.num_blocks}), got {block!r}")
        return int(self._references[number])

    def shared(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of several blocks have more references than one."""
        return np.asarray(self._references[blocks] > 1)

    def _held(self, operation: str, block: int) -> int:
        number = integer(block)
        if number is None or not 0 <= number < self.num_blocks or not self._references[number]:
            raise BlockNotAllocated(f"{operation}: block {block!r} is not allocated")
        return number

    def _take(self, count: int) -> NDArray[np.int32]:
        """So many of the free blocks, of which there are enough."""
        left = self._num_free - count
        taken = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        return taken

    def _give_back(self, blocks: NDArray[np.int32]) -> None:
        """Blocks that have no reference left."""
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)


NO_BLOCK = (
    -1
)  # in place of a block that was released, and at the end of a batch's shorter tables: no slot of it is written (KERN-02)


class BlockTables:
    """The block tables of many sequences, known by numbers, and how many tokens of theirs are written.

    A table is a segment of entries, num_layers blocks each: position p of a layer lies in entry p // block_size (PAGED-06). The
    layers lie side by side because a step looks up the same entry in all of them. counts: int64 [tables], entries in use.
    released: int64 [tables, num_layers], the first of those, which hold no block any more. lengths: int64 [tables, num_layers],
    tokens written.

    A table that outgrows its segment moves to one twice as long, at the end of the array. The gap that it leaves stays until the
    array is full: then the tables move up into a new one, without gaps and with as much again to spare. The entry after a table's
    last is always its own, and holds no block.
    """

    def __init__(self, num_layers: int, block_size: int) -> None:
        self.num_layers = whole("num_layers", num_layers)
        self.block_size = whole("block_size", block_size)
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self.released: NDArray[np.int64] = np.zeros((0, self.num_layers), np.int64)
        self.lengths: NDArray[np.int64] = np.zeros((0, self.num_layers), np.int64)
        self._entries: NDArray[np.int32] = np.full(self.num_layers, NO_BLOCK, np.int32)  # the first is every empty table's
        self._end = self.num_layers  # of what is in use of them
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)  # of each table
        self._rooms: NDArray[np.int64] = np.zeros(0, np.int64)  # what each may take from there on, the entry at its end included
        self._closed: list[int] = []

    def open(self) -> int:
        """The number of a table for a new sequence, which holds no block."""
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
        """A new table that lists the same blocks, of as many tokens."""
        new = self.open()
        self.append(new, self._segment(table).copy())
        self.lengths[new], self.released[new] = self.lengths[table], self.released[table]
        return new

    def close(self, table: int) -> NDArray[np.int32]:
        """Forget a sequence: the blocks that it held, the last entry's first."""
        held = self.cut(table, 0)
        self.lengths[table], self._starts[table], self._rooms[table] = 0, 0, 0
        self._closed.append(table)
        return held

    def extend(self, more: Mapping[int, int], blocks: NDArray[np.int32]) -> None:
        """Give some tables more entries, by table how many: num_layers blocks an entry, a table's in the order of the layers."""
        begin = 0
        for table, count in more.items():
            size = count * self.num_layers
            self.append(table, blocks[begin : begin + size].reshape(self.num_layers, count).T)
            begin += size

    def append(self, table: int, entries: NDArray[np.int32]) -> None:
        """More entries, [count, num_layers]."""
        used, size = int(self.counts[table]) * self.num_layers, entries.size
        if used + size >= self._rooms[table]:
            self._move(table, max(used + size + self.num_layers, 2 * int(self._rooms[table])))
        at = int(self._starts[table]) + used
        self._entries[at : at + size] = entries.reshape(-1)
        self.counts[table] += len(entries)

    def cut(self, table: int, count: int) -> NDArray[np.int32]:
        """Leave a table its first `count` entries: the blocks of the others, the last entry's first."""
        past = self._segment(table)[count:]
        reverse = past[::-1].reshape(-1)
        rest: NDArray[np.int32] = reverse[reverse != NO_BLOCK]
        past[:] = NO_BLOCK
        self.counts[table] = min(count, int(self.counts[table]))
        self.released[table] = np.minimum(self.released[table], count)
        return rest

    def before(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """The blocks that a table's first `counts` entries hold: in every layer so many, or one number a layer."""
        part, held = self._before(table, counts)
        return part[held]

    def release(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """Leave those entries in their place without a block: the blocks that they held, the last entry's first."""
        part, held = self._before(table, counts)
        blocks = part[::-1][held[::-1]]
        part[held] = NO_BLOCK
        self.released[table] = np.maximum(self.released[table], counts)
        return blocks

    def first(self, tables: Array) -> Array:
        """The first position whose block is still held, in each layer: of a table [num_layers], or of an array of them."""
        return self.released[tables] * self.block_size

    def replace(self, table: int, layer: int, entry: int, block: int) -> int:
        """Let an entry list another block: the one that it listed."""
        segment = self._segment(table)
        before, segment[entry, layer] = int(segment[entry, layer]), block
        return before

    def blocks(self, table: int, layer: int) -> list[int]:
        """The blocks that hold the layer's tokens, in order; NO_BLOCK where they were released."""
        held: list[int] = self._segment(table)[:, layer].tolist()
        return held

    def held(self, table: int) -> NDArray[np.int32]:
        """The blocks of every layer."""
        listed = self._segment(table).reshape(-1)
        held: NDArray[np.int32] = listed[listed != NO_BLOCK]
        return held

    def at(self, tables: Array, layers: Array, entries: Array) -> NDArray[np.int32]:
        """The blocks of entries that there are, and NO_BLOCK for one past a table's last; the three broadcast."""
        found: NDArray[np.int32] = self._entries.take(self._starts[tables] + layers + entries * self.num_layers)
        return found

    def padded(self, tables: NDArray[np.int64], layer: int) -> NDArray[np.int32]:
        """`blocks` of several tables, int32 [tables, most blocks of any], NO_BLOCK past the end of each."""
        ends = self.counts[tables] * self.num_layers
        places = np.minimum(np.arange(0, ends.max(initial=0), self.num_layers), ends[:, None])  # at the end, NO_BLOCK
        places += (self._starts[tables] + layer)[:, None]
        return self._entries.take(places)

    def entries_for(self, num_tokens: Array) -> Array:
        """How many entries so many tokens take, of an integer or an array of them (PAGED-03)."""
        return -(-num_tokens // self.block_size)

    def capacity(self, table: int) -> int:
        """Tokens the blocks of each layer have room for."""
        return int(self.counts[table]) * self.block_size

    def slots(self, tables: Array, layers: Array, positions: Array) -> NDArray[np.int64]:
        """block * block_size + offset for positions within capacity; the three broadcast against each other."""
        entry = positions // self.block_size
        blocks = self.at(tables, layers, entry)
        slots: NDArray[np.int64] = (blocks - entry) * self.block_size + positions  # the offset is positions - entry * block_size
        return slots

    def _segment(self, table: int) -> NDArray[np.int32]:
        """A table's entries, [count, num_layers]: to be read and written."""
        start = self._starts[table]
        stop = start + self.counts[table] * self.num_layers
        return self._entries[start:stop].reshape(-1, self.num_layers)

    def _before(self, table: int, counts: int | NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The entries among which the first `counts` that were not released lie, and where in them."""
        released = self.released[table]
        begin = int(released.min(where=counts > released, initial=self.counts[table]))
        entries = np.arange(begin, max(begin, np.max(counts)))[:, None]
        return self._segment(table)[begin : begin + len(entries)], (released <= entries) & (entries < counts)

    def _move(self, table: int, room: int) -> None:
        """Give a table more room, at the end."""
        if self._end + room > len(self._entries):
            self._close_up(room)
        held = self._segment(table)
        self._starts[table], self._rooms[table] = self._end, room
        self._end += room
        self._segment(table)[:] = held

    def _close_up(self, room: int) -> None:
        """Leave no gaps between the tables, in a new array with `room` after them and as much again as they take."""
        ends = self.num_layers + np.cumsum(self._rooms)
        starts, end = np.where(self._rooms, ends - self._rooms, 0), int(ends[-1])
        entries = np.full(2 * end + room, NO_BLOCK, np.int32)
        entries[self.num_layers : end] = self._entries[
            np.arange(self.num_layers, end) + np.repeat(self._starts - starts, self._rooms)
        ]
        self._starts, self._entries, self._end = starts, entries, end
