"""Sequences of tokens in blocks from one pool: who holds which block, shares it, and gives it back.

A sequence's table says which blocks hold which of its tokens, layer by layer; token p lies in entry p // block_size at offset
p % block_size. What lies in the blocks is the business of the cache that is made of this.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.backend import Backend
from kvref.blocks import BlockPool, BlockTables
from kvref.errors import LayerOutOfRange, NotTruncatable, OutOfBlocks, PositionOutOfRange, SequenceNotFound, in_range, integer


class Holders(ABC):
    """Sequences as holders of blocks, `num_layers` tables each: they come, share, make room to be written to, and go."""

    def __init__(self, num_blocks: int, num_layers: int, block_size: int, backend: Backend) -> None:
        self.pool = BlockPool(num_blocks)
        self._backend = backend
        self._tables = BlockTables(num_layers, block_size)
        self._table_of: dict[int, int] = {}  # by sequence, the number of its block table
        self._next_sequence = 0

    @abstractmethod
    def _copy(self, sources: list[int], targets: list[int]) -> None:
        """Let blocks hold what others do."""

    @property
    def utilization(self) -> float:
        """Blocks in use / all blocks."""
        return self.pool.utilization

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def create(self) -> int:
        """A new, empty sequence, holding no block: its id, counted up from 0 and never used again (PAGED-01)."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._table_of[sequence] = self._tables.open()
        return sequence

    def drop(self, sequence: int) -> None:
        """Forget a sequence and give back every block it held. Raises SequenceNotFound."""
        self.pool.free_many(self._tables.close(self._table(sequence)))
        del self._table_of[sequence]

    def fork(self, sequence: int) -> int:
        """A new sequence that reads as this one does: it shares its blocks until one of them is written to (SHARE-03).

        Takes no block and touches no data. Raises SequenceNotFound.
        """
        table = self._tables.fork(self._table(sequence))
        self.pool.share_many(self._tables.held(table))
        child = self._next_sequence
        self._next_sequence += 1
        self._table_of[child] = table
        return child

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens of every layer, and give back the blocks past them (EDIT-01).

        Raises PositionOutOfRange for more tokens than some layer has (EDIT-02), NotTruncatable for fewer than were released,
        unless none is left.
        """
        table = self._table(sequence)
        length = in_range(length, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "length")
        if 0 < length < (first := int(self._tables.first(table).max())):
            raise NotTruncatable(f"cannot truncate to {length}: blocks before position {first} were released")
        self._cut(table, length)

    def _table(self, sequence: int) -> int:
        """The number of a sequence's block table."""
        number = integer(sequence)
        if number is None or number not in self._table_of:
            raise SequenceNotFound(f"unknown sequence {sequence!r} (never created, or already dropped)")
        return self._table_of[number]

    def _missing(self, table: int, num_tokens: int) -> dict[int, int]:
        """The entries that a table needs for so many tokens, as `_prepare` takes them."""
        return {table: max(0, self._tables.entries_for(num_tokens) - int(self._tables.counts[table]))}

    def _prepare(self, more: Mapping[int, int], tables: Array, layers: Array, positions: Array) -> None:
        """Room to write: so many more entries of each table, and blocks that no one else holds at the positions to be written.

        tables, layers and positions broadcast against each other. Raises OutOfBlocks, and then nothing has changed (SHARE-07).
        """
        places = self._shared(tables, layers, positions // self._tables.block_size)
        needed = self._tables.num_layers * sum(more.values())
        if needed + len(places) > self.pool.num_free:
            raise OutOfBlocks(f"out of blocks: {needed + len(places)} needed, {self.pool.num_free} free")
        if needed:
            self._tables.extend(more, self.pool.allocate_many(needed))
        if places:
            targets = self.pool.allocate_many(len(places))
            sources = [self._tables.replace(*place, block) for place, block in zip(places, targets.tolist(), strict=True)]
            self._copy(sources, targets.tolist())
            for source in sources:  # one may be there twice
                self.pool.free(source)

    def _shared(self, tables: Array, layers: Array, entries: Array) -> list[tuple[int, int, int]]:
        """The places among these whose blocks have to be copied before they are written to (SHARE-05).

        Of those that write to the same block the last to hold it keeps it.
        """
        entries = np.minimum(entries, self._tables.counts[tables])  # past the end there is none to be shared
        blocks = self._tables.at(tables, layers, entries)
        shared = self._kept(blocks)
        if not shared.any():
            return []
        all_places = (np.broadcast_to(each, blocks.shape)[shared].tolist() for each in (tables, layers, entries))
        places = dict(zip(zip(*all_places, strict=True), blocks[shared].tolist(), strict=True))
        others = {block: self._others(block) for block in places.values()}
        copied = []
        for place, block in places.items():
            if others[block]:
                others[block] -= 1
                copied.append(place)
        return copied

    def _kept(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which blocks someone has to find as they are, besides one that holds them."""
        return self.pool.shared(blocks)

    def _others(self, block: int) -> int:
        """How many that are."""
        return self.pool.references(block) - 1

    def _cut(self, table: int, lengths: int | NDArray[np.int64]) -> None:
        """Leave a table so many tokens of each layer, and the blocks that they take."""
        self._tables.lengths[table] = lengths
        entries = self._tables.entries_for(int(self._tables.lengths[table].max()))
        self.pool.free_many(self._tables.cut(table, entries))


class Sequences(Holders):
    """Those whose tables are their layers', which are written to one by one and have lengths of their own."""

    def release_before(self, sequence: int, position: int) -> None:
        """Give back the blocks, of every layer, all of whose tokens lie before `position`: no window sees them (WIN-09).

        Nothing moves. The table lists NO_BLOCK in their place; reading or writing there raises PositionOutOfRange, and what goes
        over all tokens goes over those that are left. Raises PositionOutOfRange for more tokens than some layer has.
        """
        table = self._table(sequence)
        position = in_range(position, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "position")
        self.pool.free_many(self._tables.release(table, position // self._tables.block_size))

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        """Hold ceil(num_tokens / block_size) blocks in every layer, or more. Raises OutOfBlocks and takes none (PAGED-05)."""
        table = self._table(sequence)
        missing = self._missing(table, in_range(num_tokens, None, PositionOutOfRange, "num_tokens"))
        self._prepare(missing, table, 0, np.arange(0))

    def length(self, sequence: int, layer: int) -> int:
        """Tokens written to the layer: not the room its blocks have (PAGED-09)."""
        return int(self._tables.lengths[self._table(sequence), self._layer(layer)])

    def lengths(self, sequences: Sequence[int], layer: int) -> Array:
        """`length` of B sequences, int32 [B] (PAGED-17)."""
        tables, layer = self._tables_of(sequences), self._layer(layer)
        return self._backend.asarray(self._tables.lengths[tables, layer].astype(np.int32))

    def block_table(self, sequence: int, layer: int) -> list[int]:
        """The blocks that hold the layer's tokens, in order; -1 where they were released."""
        return self._tables.blocks(self._table(sequence), self._layer(layer))

    def block_tables(self, sequences: Sequence[int], layer: int) -> Array:
        """`block_table` of B sequences, int32 [B, most blocks of any], -1 past the end of a table (PAGED-17)."""
        tables, layer = self._tables_of(sequences), self._layer(layer)
        return self._backend.asarray(self._tables.padded(tables, layer))

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        """block * block_size + offset for positions start .. start + count, all within the blocks held (PAGED-06)."""
        table, layer = self._table(sequence), self._layer(layer)
        start = self._held(table, start, None, "start")
        end = start + in_range(count, None, PositionOutOfRange, "count")
        in_range(end, self._tables.capacity(table) + 1, PositionOutOfRange, "start + count")
        slots: list[int] = self._tables.slots(table, layer, np.arange(start, end)).tolist()
        return slots

    def _tables_of(self, sequences: Sequence[int]) -> NDArray[np.int64]:
        if set(map(type, sequences)) <= {int} and self._table_of.keys() >= set(sequences):
            return np.array([self._table_of[sequence] for sequence in sequences], np.int64)
        return np.array([self._table(sequence) for sequence in sequences], np.int64)  # NumPy's integers, or it raises

    def _layer(self, layer: int) -> int:
        return in_range(layer, self._tables.num_layers, LayerOutOfRange, "layer")

    def _held(self, table: int, position: int, stop: int | None, what: str) -> int:
        """`position`, one in [0, stop) that was not released. Raises PositionOutOfRange."""
        position = in_range(position, stop, PositionOutOfRange, what)
        if position < (first := int(self._tables.first(table).max())):
            raise PositionOutOfRange(f"{what}: {position} cannot be read, blocks before position {first} were released")
        return position

    def _missing_each(self, tables: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> dict[int, int]:
        """`_missing` of several."""
        missing = self._tables.entries_for(num_tokens) - self._tables.counts[tables]
        short = (missing > 0).nonzero()[0]
        more: dict[int, int] = {}
        for table, count in zip(tables[short].tolist(), missing[short].tolist(), strict=True):
            more[table] = max(count, more.get(table, 0))  # a sequence may be named twice
        return more
