"""The block tables of a paged cache: for each sequence and layer, the list of the blocks that contain its tokens, in order."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.errors import whole

# In a table: the entry was released, or the table ends before it. The slots of NO_BLOCK are negative, never written (KERN-02).
NO_BLOCK = -1


class BlockTables:
    """The block tables of many sequences, and the lengths of their layers.

    A sequence has one table, which is identified by its number. A table consists of one list of block ids per layer:
    `_blocks[table][layer][entry]`. Position p of a layer is in entry p // block_size, at offset p % block_size (PAGED-06). All
    layers of a table have the same number of entries.

    Two arrays, int64 [tables, num_layers], are indexed by table number and layer:

    - `lengths`: the number of tokens written. It can be less than the table has room for.
    - `released`: the number of first entries whose blocks were released (WIN-09). These entries contain NO_BLOCK.

    The tables do not own the blocks: methods that remove entries return their blocks, and the caller frees them in the pool.
    """

    def __init__(self, num_layers: int, block_size: int) -> None:
        """Create an empty collection. Raises ConfigError unless both sizes are integers of at least 1."""
        self.num_layers = whole("num_layers", num_layers)
        self.block_size = whole("block_size", block_size)
        self._blocks: list[list[list[int]]] = []
        self.lengths: NDArray[np.int64] = np.zeros((0, self.num_layers), np.int64)
        self.released: NDArray[np.int64] = np.zeros((0, self.num_layers), np.int64)
        self._closed: list[int] = []  # numbers without a table

    def open(self) -> int:
        """Create an empty table, for a new sequence, and return its number. Numbers of closed tables are used again."""
        if self._closed:
            return self._closed.pop()
        self._blocks.append([[] for _ in range(self.num_layers)])
        empty = np.zeros((1, self.num_layers), np.int64)
        self.lengths, self.released = (np.concatenate([each, empty]) for each in (self.lengths, self.released))
        return len(self._blocks) - 1

    def fork(self, table: int) -> int:
        """Create a table with the same entries and lengths as `table`, and return its number. References are not changed."""
        new = self.open()
        self._blocks[new] = [list(blocks) for blocks in self._blocks[table]]
        self.lengths[new], self.released[new] = self.lengths[table], self.released[table]
        return new

    def close(self, table: int) -> NDArray[np.int32]:
        """Remove a table, and return the blocks that it listed, the last entry first: int32 [n]."""
        blocks = self.cut(table, 0)
        self.lengths[table] = 0
        self._closed.append(table)
        return blocks

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
        for layer, new in zip(self._blocks[table], entries.T.tolist(), strict=True):
            layer += new

    def cut(self, table: int, count: int) -> NDArray[np.int32]:
        """Remove all entries but the first `count`, and return the blocks that they listed, the last entry first: int32 [n]."""
        blocks = self._listed(table, reversed(range(count, self.count(table))))
        for layer in self._blocks[table]:
            del layer[count:]
        self.released[table] = np.minimum(self.released[table], count)
        return blocks

    def before(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the blocks that the first `counts` entries of a table list: int32 [n]. counts: one number, or one per layer."""
        return np.array([layer[entry] for layer, entry in self._unreleased(table, counts)], np.int32)

    def release(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """Replace the blocks of the first `counts` entries by NO_BLOCK; return them, the last entry first: int32 [n] (WIN-09).

        counts: one number, or one per layer. The entries keep their indices.
        """
        blocks = list[int]()
        for layer, entry in sorted(self._unreleased(table, counts), key=lambda place: -place[1]):  # stable: layers in order
            blocks.append(layer[entry])
            layer[entry] = NO_BLOCK
        self.released[table] = np.maximum(self.released[table], counts)
        return np.array(blocks, np.int32)

    def first(self, tables: Array) -> Array:
        """Return the first position not released, per layer: [num_layers] for one table, [n, num_layers] for several."""
        return self.released[tables] * self.block_size

    def replace(self, table: int, layer: int, entry: int, block: int) -> int:
        """Set the block of an entry in one layer, and return the block that it listed before."""
        blocks = self._blocks[table][layer]
        before, blocks[entry] = blocks[entry], block
        return before

    def count(self, table: int) -> int:
        """Return the number of entries of a table."""
        return len(self._blocks[table][0])

    def blocks(self, table: int, layer: int) -> list[int]:
        """Return the block ids of a layer, in the order of the entries; NO_BLOCK for released entries."""
        return list(self._blocks[table][layer])

    def held(self, table: int) -> NDArray[np.int32]:
        """Return the blocks that a table lists in all layers, without NO_BLOCK: int32 [n]."""
        return self._listed(table, range(self.count(table)))

    def at(self, tables: Array, layers: Array, entries: Array) -> NDArray[np.int32]:
        """Return the blocks of entries, int32; NO_BLOCK for entries past a table's end. The arguments broadcast."""
        if np.ndim(tables) == np.ndim(layers) == 0 and np.size(entries):  # all in one list: convert the part that contains them
            first, last = int(np.min(entries)), int(np.max(entries))
            part = np.array([*self._blocks[tables][layers][first : last + 1], NO_BLOCK], np.int32)
            found: NDArray[np.int32] = part[np.minimum(entries - first, len(part) - 1)]
            return found
        places = np.broadcast_arrays(tables, layers, entries)
        blocks = [
            listed[entry] if entry < len(listed := self._blocks[table][layer]) else NO_BLOCK
            for table, layer, entry in zip(*(each.reshape(-1).tolist() for each in places), strict=True)
        ]
        return np.array(blocks, np.int32).reshape(places[0].shape)

    def padded(self, tables: NDArray[np.int64], layer: int) -> NDArray[np.int32]:
        """Return `blocks` of several tables as int32 [tables, most entries of any], with NO_BLOCK past the end of each table."""
        rows = [self._blocks[table][layer] for table in tables.tolist()]
        most = max(map(len, rows), default=0)
        return np.array([row + [NO_BLOCK] * (most - len(row)) for row in rows], np.int32).reshape(len(rows), most)

    def entries_for(self, num_tokens: Array) -> Array:
        """Return ceil(num_tokens / block_size), the entries that num_tokens tokens need (PAGED-03). An integer or an array."""
        return -(-num_tokens // self.block_size)

    def capacity(self, table: int) -> int:
        """Return the number of tokens for which the table has entries: count * block_size."""
        return self.count(table) * self.block_size

    def slots(self, tables: Array, layers: Array, positions: Array) -> NDArray[np.int64]:
        """Return the slots of positions within the capacity, int64 (PAGED-06). The arguments broadcast against each other."""
        blocks = self.at(tables, layers, positions // self.block_size).astype(np.int64)
        slots: NDArray[np.int64] = blocks * self.block_size + positions % self.block_size
        return slots

    def _listed(self, table: int, entries: Iterable[int]) -> NDArray[np.int32]:
        """The blocks of these entries in all layers, entry by entry, without NO_BLOCK."""
        blocks = (layer[entry] for entry in entries for layer in self._blocks[table])
        return np.array([block for block in blocks if block != NO_BLOCK], np.int32)

    def _unreleased(self, table: int, counts: int | NDArray[np.int64]) -> list[tuple[list[int], int]]:
        """The first `counts` entries that are not released: pairs of a layer's list and an index in it, entry by entry."""
        layers = list(zip(self._blocks[table], self.released[table], np.broadcast_to(counts, self.num_layers), strict=True))
        entries = range(int(self.released[table].min()), int(np.max(counts)))
        return [(blocks, entry) for entry in entries for blocks, released, count in layers if released <= entry < count]
