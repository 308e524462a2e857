"""Sequences whose tokens are in blocks of one pool: the base classes of the paged, prefix and grouped caches.

These classes allocate, share, copy and free blocks (chapters PAGED, SHARE and EDIT). They do not read or write tokens: the caches
derived from them do, and copy a block's tokens on request (`_copy_blocks`).

A sequence has one table in BlockTables: a list of blocks per layer. The token at position p of a layer is in the block at index
p // block_size of the list, at offset p % block_size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.backend import Backend
from kvref.block_pool import BlockPool
from kvref.block_tables import BlockTables
from kvref.errors import LayerOutOfRange, NotTruncatable, OutOfBlocks, PositionOutOfRange, SequenceNotFound, in_range, integer


class BlockOwner(ABC):
    """Sequences that own blocks of one pool: it creates, forks, truncates and drops them, and makes their blocks writable.

    It owns the pool and the block tables. Three invariants hold between any two calls:

    - The number of references of a block is the number of table entries that list it (LAW-03). Without references it is free.
    - A block with one reference belongs to one sequence, which writes to it in place. A block with more is shared: before a write
      to it, the writer gets a copy (copy-on-write, SHARE-05).
    - A call gets all the blocks that it needs, or raises OutOfBlocks and changes nothing (PAGED-05, SHARE-07).

    Every write goes through `_make_writable`, which allocates new entries and copies shared blocks.

    Ids of sequences count up from 0 and are never reused (PAGED-01). Every method that receives an id raises SequenceNotFound if
    it is not the id of a live sequence (PAGED-08).
    """

    def __init__(self, num_blocks: int, num_layers: int, block_size: int, backend: Backend) -> None:
        self.pool = BlockPool(num_blocks)
        self._backend = backend
        self._tables = BlockTables(num_layers, block_size)
        self._table_of: dict[int, int] = {}  # the number of the block table, by sequence id
        self._next_sequence = 0

    @abstractmethod
    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy the tokens of each block in `sources` to the block at the same index of `targets`."""

    @property
    def utilization(self) -> float:
        """Allocated blocks / all blocks; 0.0 for a pool of 0 blocks (BLOCK-06)."""
        return self.pool.utilization

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks in the pool. Cached blocks that no table lists are free (PREFIX-06)."""
        return self.pool.num_free

    def create(self) -> int:
        """Create an empty sequence without blocks, and return its id (PAGED-01, PAGED-02)."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._table_of[sequence] = self._tables.open()
        return sequence

    def drop(self, sequence: int) -> None:
        """Remove a sequence, and one reference to each block in its tables (PAGED-07). Raises SequenceNotFound.

        Blocks without references are free afterwards.
        """
        self.pool.free_many(self._tables.close(self._table(sequence)))
        del self._table_of[sequence]

    def fork(self, sequence: int) -> int:
        """Create a sequence with the same tokens, and return its id (SHARE-03).

        The two share all blocks. A shared block is copied before a write to it (SHARE-05), so `fork` itself allocates no block
        and copies no token. Raises SequenceNotFound.
        """
        table = self._tables.fork(self._table(sequence))
        self.pool.share_many(self._tables.held(table))
        child = self._next_sequence
        self._next_sequence += 1
        self._table_of[child] = table
        return child

    def truncate(self, sequence: int, length: int) -> None:
        """Remove all tokens but the first `length` from every layer, and free the blocks past them (EDIT-01, EDIT-04).

        Raises PositionOutOfRange if some layer has fewer than `length` tokens (EDIT-02), NotTruncatable if the new end is before
        the first position that is not released and `length` is not 0 (WIN-09), and SequenceNotFound.
        """
        table = self._table(sequence)
        length = in_range(length, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "length")
        if 0 < length < (first := int(self._tables.first(table).max())):
            raise NotTruncatable(f"cannot truncate to {length}: blocks before position {first} were released")
        self._set_lengths(table, length)

    def _table(self, sequence: int) -> int:
        """The number of a sequence's block table. Raises SequenceNotFound."""
        number = integer(sequence)
        if number is None or number not in self._table_of:
            raise SequenceNotFound(f"unknown sequence {sequence!r} (never created, or already dropped)")
        return self._table_of[number]

    def _missing_entries(self, table: int, num_tokens: int) -> dict[int, int]:
        """The number of entries that a table lacks for `num_tokens` tokens, as the argument `more` of `_make_writable`."""
        return {table: max(0, self._tables.entries_for(num_tokens) - self._tables.count(table))}

    def _make_writable(self, more: Mapping[int, int], tables: Array, layers: Array, positions: Array) -> None:
        """Allocate entries and copy shared blocks, so that the positions can be written.

        more: the number of new entries, by table. tables, layers and positions broadcast against each other. Raises OutOfBlocks
        and changes nothing if there are too few free blocks for all of it (PAGED-05, SHARE-07).
        """
        places = self._places_to_copy(tables, layers, positions // self._tables.block_size)
        needed = self._tables.num_layers * sum(more.values())
        if needed + len(places) > self.pool.num_free:
            raise OutOfBlocks(f"out of blocks: {needed + len(places)} needed, {self.pool.num_free} free")
        if needed:
            self._tables.extend(more, self.pool.allocate_many(needed))
        if places:
            targets = self.pool.allocate_many(len(places))
            sources = [self._tables.replace(*place, block) for place, block in zip(places, targets.tolist(), strict=True)]
            self._copy_blocks(sources, targets.tolist())
            for source in sources:  # not free_many: a source can occur twice
                self.pool.free(source)

    def _places_to_copy(self, tables: Array, layers: Array, entries: Array) -> list[tuple[int, int, int]]:
        """The places (table, layer, entry) whose blocks must be copied before they are written to (SHARE-05).

        The arguments broadcast. If several places write to the same block, and nothing else needs it, the last of them keeps the
        original.
        """
        blocks = self._tables.at(tables, layers, entries)  # NO_BLOCK for new entries, which are not yet in the tables
        protected = self._needs_copy(blocks)
        if not protected.any():
            return []
        all_places = (np.broadcast_to(each, blocks.shape)[protected].tolist() for each in (tables, layers, entries))
        places = dict(zip(zip(*all_places, strict=True), blocks[protected].tolist(), strict=True))  # each place once
        copies_left = {block: self._copies_needed(block) for block in places.values()}
        to_copy = []
        for place, block in places.items():
            if copies_left[block]:
                copies_left[block] -= 1
                to_copy.append(place)
        return to_copy

    def _needs_copy(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Mask of blocks that must not be overwritten in place: shared blocks, in a prefix cache also cached blocks."""
        return self.pool.shared(blocks)

    def _copies_needed(self, block: int) -> int:
        """How many owners of a block need a copy if all of them write to it: all but one, and all if the block is cached."""
        return self.pool.references(block) - 1

    def _set_lengths(self, table: int, lengths: int | NDArray[np.int64]) -> None:
        """Set the length of each layer of a table, and free the blocks past the longest."""
        self._tables.lengths[table] = lengths
        entries = self._tables.entries_for(int(self._tables.lengths[table].max()))
        self.pool.free_many(self._tables.cut(table, entries))


class PagedSequences(BlockOwner):
    """Sequences with one block table per layer: the part of a paged cache that reads and extends the tables (chapter PAGED).

    Layers are written one by one and can have different lengths. Blocks are allocated for all layers at once, so that all tables
    of a sequence have the same number of entries.
    """

    def release_before(self, sequence: int, position: int) -> None:
        """Free the blocks, in every layer, whose positions are all before `position`, because no window sees them (WIN-09).

        No token moves. The tables list -1 for the released entries. Afterwards `read`, `write` and `slot_mapping` raise
        PositionOutOfRange at a released position, and `gather`, `attend` and `save` cover the other positions.

        Raises PositionOutOfRange if `position` is not in `[0, n + 1)` for the length n of every layer, and SequenceNotFound.
        """
        table = self._table(sequence)
        position = in_range(position, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "position")
        self.pool.free_many(self._tables.release(table, position // self._tables.block_size))

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        """Allocate blocks until every layer has at least ceil(num_tokens / block_size) (PAGED-04).

        It never frees blocks. Raises OutOfBlocks if too few are free, and then allocates none (PAGED-05); PositionOutOfRange if
        `num_tokens` is negative; SequenceNotFound.
        """
        table = self._table(sequence)
        missing = self._missing_entries(table, in_range(num_tokens, None, PositionOutOfRange, "num_tokens"))
        self._make_writable(missing, table, 0, np.arange(0))

    def length(self, sequence: int, layer: int) -> int:
        """Return the number of tokens in a layer, not its capacity (PAGED-09). Raises SequenceNotFound or LayerOutOfRange."""
        return int(self._tables.lengths[self._table(sequence), self._layer(layer)])

    def lengths(self, sequences: Sequence[int], layer: int) -> Array:
        """Return the `length` of each of B sequences, int32 [B] (PAGED-17). Raises SequenceNotFound or LayerOutOfRange."""
        tables, layer = self._tables_of(sequences), self._layer(layer)
        return self._backend.asarray(self._tables.lengths[tables, layer].astype(np.int32))

    def block_table(self, sequence: int, layer: int) -> list[int]:
        """Return the block ids of a layer's table, -1 for released entries. Raises SequenceNotFound or LayerOutOfRange."""
        return self._tables.blocks(self._table(sequence), self._layer(layer))

    def block_tables(self, sequences: Sequence[int], layer: int) -> Array:
        """Return the block tables of B sequences as int32 [B, most entries of any], with -1 past the end of each (PAGED-17).

        Raises SequenceNotFound or LayerOutOfRange.
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        return self._backend.asarray(self._tables.padded(tables, layer))

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        """Return the slots of the positions `[start, start + count)`: block * block_size + offset (PAGED-06).

        Raises PositionOutOfRange if they are not within the capacity or are released, SequenceNotFound or LayerOutOfRange.
        """
        table, layer = self._table(sequence), self._layer(layer)
        start = self._check_position(table, start, None, "start")
        end = start + in_range(count, None, PositionOutOfRange, "count")
        in_range(end, self._tables.capacity(table) + 1, PositionOutOfRange, "start + count")
        slots: list[int] = self._tables.slots(table, layer, np.arange(start, end)).tolist()
        return slots

    def _tables_of(self, sequences: Sequence[int]) -> NDArray[np.int64]:
        """The table numbers of sequences. Raises SequenceNotFound."""
        if set(map(type, sequences)) <= {int} and self._table_of.keys() >= set(sequences):
            return np.array([self._table_of[sequence] for sequence in sequences], np.int64)
        return np.array([self._table(sequence) for sequence in sequences], np.int64)  # NumPy integers, or an unknown sequence

    def _layer(self, layer: int) -> int:
        return in_range(layer, self._tables.num_layers, LayerOutOfRange, "layer")

    def _check_position(self, table: int, position: int, stop: int | None, what: str) -> int:
        """`position` as a Python int. Raises PositionOutOfRange unless it is in [0, stop) and not released."""
        position = in_range(position, stop, PositionOutOfRange, what)
        if position < (first := int(self._tables.first(table).max())):
            raise PositionOutOfRange(f"{what}: {position} was released: positions from {first} on remain")
        return position

    def _missing_entries_of_batch(self, tables: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> dict[int, int]:
        """`_missing_entries` for several tables. If a table occurs more than once, its largest number counts."""
        more: dict[int, int] = {}
        for table, needed in zip(tables.tolist(), self._tables.entries_for(num_tokens).tolist(), strict=True):
            if (missing := needed - self._tables.count(table)) > 0:
                more[table] = max(missing, more.get(table, 0))
        return more
