"""Blocks of slots, handed out and taken back: the pool and the tables that PagedAttention stands on.

A block is `block_size` consecutive slots of the key and the value store. The pool knows which blocks are free; the tables list,
for each sequence and layer, which blocks hold its tokens, in order. All tables are one integer array, so that a step of many
sequences is a few operations on arrays, however many there are and however long.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.errors import BlockNotAllocated, OutOfBlocks, is_integer, whole


class BlockPool:
    """`num_blocks` blocks, each free or held by exactly one owner (LAW-03). A pool of none is allowed (BLOCK-06)."""

    def __init__(self, num_blocks: int) -> None:
        whole("num_blocks", num_blocks, minimum=0)
        self.num_blocks = num_blocks
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # a stack, of which num_free are there
        self._num_free = len(self._free)
        self._held: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    @property
    def utilization(self) -> float:
        """used / total in [0, 1]; 0.0 for a pool of none."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    def allocate(self) -> int:
        """A block no one holds. Raises OutOfBlocks when every block is held."""
        return int(self.allocate_many(1)[0])

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        """`count` blocks no one holds, int32 [count], or none of them. Raises OutOfBlocks when fewer are free."""
        left = self.num_free - count
        if left < 0:
            raise OutOfBlocks(f"allocate: expected {count} free of {self.num_blocks} blocks, got {self.num_free}")
        taken = self._free[left : self._num_free][::-1].copy()
        self._held[taken] = True
        self._num_free = left
        return taken

    def free(self, block: int) -> None:
        """Give `block` back. Raises BlockNotAllocated unless it is held: a block freed twice would get two owners (BLOCK-05)."""
        if not is_integer(block) or not 0 <= block < self.num_blocks or not self._held[block]:
            raise BlockNotAllocated(f"free: expected a block that is held, got {block!r}")
        self._held[block] = False
        self._free[self._num_free] = block
        self._num_free += 1


NO_BLOCK = -1  # what a table holds past its end: a slot of it is negative, and skipped (KERN-02)


class BlockTables:
    """The block tables of many sequences, a row each, and how many tokens of theirs are written.

    blocks: int32 [rows, room, num_layers], position p of a layer in entry p // block_size (PAGED-06), NO_BLOCK past the end.
    Layers come last because a step looks up the same entry in all of them. counts: int64 [rows], blocks held in every layer.
    lengths: int64 [rows, num_layers], tokens written.
    """

    def __init__(self, num_layers: int, block_size: int) -> None:
        whole("num_layers", num_layers)
        whole("block_size", block_size)
        self.num_layers = num_layers
        self.block_size = block_size
        self.blocks: NDArray[np.int32] = np.full((0, 1, num_layers), NO_BLOCK, np.int32)
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self.lengths: NDArray[np.int64] = np.zeros((0, num_layers), np.int64)
        self._closed: list[int] = []

    def open(self) -> int:
        """A row for a new sequence, which holds no block."""
        if not self._closed:
            rows = len(self.counts)
            self._grow(max(8, 2 * rows), self.blocks.shape[1])
            self._closed = list(reversed(range(rows, len(self.counts))))
        return self._closed.pop()

    def close(self, row: int) -> list[int]:
        """Forget a sequence: the blocks that it held, layer by layer."""
        held: list[int] = self.blocks[row, : self.counts[row]].T.reshape(-1).tolist()
        self.blocks[row], self.counts[row], self.lengths[row] = NO_BLOCK, 0, 0
        self._closed.append(row)
        return held

    def extend(self, more: Mapping[int, int], blocks: NDArray[np.int32]) -> None:
        """Give some rows more entries, by row how many: num_layers blocks an entry, a row's in the order of the layers."""
        start = 0
        for row, count in more.items():
            first = int(self.counts[row])
            if first + count > self.blocks.shape[1]:
                self._grow(len(self.counts), max(first + count, 2 * self.blocks.shape[1]))
            new = blocks[start : start + count * self.num_layers].reshape(self.num_layers, count)
            self.blocks[row, first : first + count] = new.T
            self.counts[row] = first + count
            start += new.size

    def table(self, row: int, layer: int) -> list[int]:
        """The blocks that hold the layer's tokens, in order."""
        held: list[int] = self.blocks[row, : self.counts[row], layer].tolist()
        return held

    def capacity(self, row: int) -> int:
        """Tokens the blocks of each layer have room for."""
        return int(self.counts[row]) * self.block_size

    def slots(self, rows: Array, layers: Array, positions: Array) -> NDArray[np.int64]:
        """block * block_size + offset for positions within capacity; the three broadcast against each other."""
        entry = positions // self.block_size
        slots: NDArray[np.int64] = self.blocks[rows, entry, layers] * np.int64(self.block_size) + positions % self.block_size
        return slots

    def _grow(self, rows: int, room: int) -> None:
        blocks, counts, lengths = self.blocks, self.counts, self.lengths
        self.blocks = np.full((rows, room, self.num_layers), NO_BLOCK, np.int32)
        self.blocks[: len(blocks), : blocks.shape[1]] = blocks
        self.counts = np.zeros(rows, np.int64)
        self.counts[: len(counts)] = counts
        self.lengths = np.zeros((rows, self.num_layers), np.int64)
        self.lengths[: len(lengths)] = lengths
