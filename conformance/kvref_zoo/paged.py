"""Wrong paged caches."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvref
from kvref.formats import FORMATS
from kvref_zoo.mutant import mutant


@mutant("MOVE-03", also="MOVE-02 MOVE-05", seen_in="ggml-org/llama.cpp#27052")
class MovingFailedLoadLosesOldTokens(kvref.PagedCache):
    """`load` truncates the sequence before it checks the file: if the file is damaged, the former tokens are lost."""

    def load(self, sequence: int, data: Any) -> None:
        self.truncate(sequence, 0)
        super().load(sequence, data)


@mutant("PAGED-16", seen_in="gittensor-ai-lab/sparkinfer#289")
class PagedAppendUsesTheOldestTables(kvref.PagedCache):
    """A batch is appended with the block tables of the oldest sequences, whichever it names.

    This is right until a sequence is dropped.
    """

    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        there = sorted(self._table_of)
        if len(set(sequences)) == len(sequences) and set(sequences) <= set(there):
            sequences = there[: len(sequences)]
        super().append(sequences, layer, keys, values)


@mutant("ATTN-10", seen_in="flashinfer-ai/flashinfer#1023", formats=tuple(FORMATS))
class PagedAttendsWithoutScales(kvref.PagedCache):
    """`attend` passes the codes to the kernel without their scales. Reads are right, so that only attention shows the bug."""

    def attend(self, sequence: int, layer: int, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        stores = self._store.keys, self._store.values
        right = [store.format for store in stores]
        for store in stores:
            store.format = FORMATS[store.format.name]  # the format with a scale of 1
        try:
            return super().attend(sequence, layer, query, scale, causal)
        finally:
            for store, format in zip(stores, right, strict=True):
                store.format = format


@mutant("SHARE-07")
class PagedCopiesBeforeItCounts(kvref.PagedCache):
    """`write` copies shared blocks in order until no block is free, and keeps the copies that it has already made."""

    def _make_writable(self, more: Mapping[int, int], tables: Any, layers: Any, positions: Any) -> None:
        size = self.config.block_size
        places = self._places_to_copy(tables, layers, positions // size)
        if len(places) > 1:
            for table, layer, entry in places:
                super()._make_writable({}, table, layer, np.array([entry * size]))
        super()._make_writable(more, tables, layers, positions)


@mutant("SHARE-05", also="EDIT-05 EDIT-10 PAGED-18 SHARE-04 SHARE-06 SHARE-07 SHARE-08 SHARE-09")
class PagedCopiesKeysOnly(kvref.PagedCache):
    """Copy-on-write copies the keys and not the values: the new block keeps the values of its former owner."""

    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self._store.values.copy = lambda *what: None  # type: ignore[method-assign]


@mutant("SHARE-05", also="PAGED-03 SHARE-04 SHARE-06")
class PagedCopiesTheWholeTable(kvref.PagedCache):
    """One token written to a fork copies all blocks that the fork shares: forking saves no memory."""

    def _make_writable(self, more: Mapping[int, int], tables: Any, layers: Any, positions: Any) -> None:
        if np.size(positions) and np.ndim(tables) == np.ndim(layers) == 0:
            positions = np.arange(self._tables.capacity(tables))
        super()._make_writable(more, tables, layers, positions)


@mutant("PAGED-06", also="SHARE-05", seen_in="vllm-project/vllm#47056")
class PagedDecodesWithAnotherBlockSize(kvref.PagedCache):
    """Tokens are written with one block size, and `slot_mapping` computes slots with another."""

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        size = self.config.block_size
        slots = super().slot_mapping(sequence, layer, start, count)
        return [slot // size * 16 + slot % size for slot in slots]


@mutant(
    "PAGED-07",
    also="EDIT-04 EDIT-05 EDIT-10 LAW-03 LAW-08 LAW-17 LAW-21 MOVE-03 MOVE-05 PAGED-15 PAGED-18 SHARE-04 SHARE-06"
    " SHARE-08 SHARE-09 WIN-09",
)
class PagedDropsFullBlocksOnly(kvref.PagedCache):
    """`drop` frees only the blocks that are full: a last block that is partly filled never returns to the pool."""

    def drop(self, sequence: int) -> None:
        number, size = self._table(sequence), self.config.block_size
        for layer in range(self.config.num_layers):
            filled = self.length(sequence, layer) // size
            partly = filled + 1 if self.length(sequence, layer) % size else filled
            table = self.block_table(sequence, layer)
            for block in table[:filled] + table[partly:]:
                self.pool.free(block)
        self._tables.close(number)
        del self._table_of[sequence]


@mutant("PAGED-05", also="LAW-01 LAW-11 MOVE-03 SHARE-07")
class PagedFailedAllocationKeepsBlocks(kvref.PagedCache):
    """Blocks are allocated one at a time. If the pool is exhausted, the call raises OutOfBlocks and keeps the blocks it has."""

    def _make_writable(self, more: Mapping[int, int], tables: Any, layers: Any, positions: Any) -> None:
        for table, count in more.items():
            for _ in range(count):
                self._tables.extend({table: 1}, np.array([self.pool.allocate() for _ in range(self.config.num_layers)], np.int32))
        super()._make_writable({}, tables, layers, positions)


@mutant("SHARE-03", also="EDIT-05 EDIT-10 MOVE-03 PAGED-15 SHARE-04 SHARE-05 SHARE-06 SHARE-07")
class PagedForkCopiesEverything(kvref.PagedCache):
    """`fork` copies all tokens: sixteen samples of one prompt take sixteen times its memory."""

    def fork(self, sequence: int) -> int:
        child = super().fork(sequence)
        for layer in range(self.config.num_layers):
            self._make_writable({}, self._table(child), layer, np.arange(self.length(child, layer)))
        return child


@mutant("SHARE-06", also="EDIT-04 EDIT-05 EDIT-10 MOVE-05 PAGED-08 PAGED-18 SHARE-04 SHARE-05 SHARE-07 SHARE-08 SHARE-09")
class PagedForkTakesNoReference(kvref.PagedCache):
    """`fork` copies the block table and adds no references: the first sequence to be dropped frees the blocks of the others."""

    def fork(self, sequence: int) -> int:
        child = self.create()
        table = self._tables.fork(self._table(sequence))
        self._tables.close(self._table_of[child])
        self._table_of[child] = table
        return child

    def drop(self, sequence: int) -> None:
        held = self._tables.close(self._table(sequence))
        self.pool.free_many(held[self.pool._references[held] > 0])
        del self._table_of[sequence]


@mutant(
    "PAGED-07",
    also="EDIT-03 EDIT-04 EDIT-05 EDIT-10 LAW-03 LAW-04 LAW-19 MOVE-05 PAGED-12 PAGED-13 PAGED-15 SHARE-04 SHARE-05"
    " SHARE-06 SHARE-08 SHARE-09 WIN-09",
    seen_in="vllm-project/vllm#42571",
)
class PagedFreesSharedLayersTwice(kvref.PagedCache):
    """`drop` frees the blocks of the first layer again for each further layer: the pool reports more free blocks than it has."""

    def drop(self, sequence: int) -> None:
        first = self.block_table(sequence, 0)
        super().drop(sequence)
        again = first * (self.config.num_layers - 1)
        self.pool._free = np.append(self.pool._free[: self.pool.num_free], np.array(again, np.int32))
        self.pool._num_free += len(again)


@mutant("LAW-17", also="ATTN-10 EDIT-10 LAW-20 LAW-21 MOVE-01 MOVE-05 PAGED-12 PAGED-17 PAGED-18")
class PagedGatherReusesItsResult(kvref.PagedCache):
    """Every `gather` returns the same scratch array: the result of one read changes with the next."""

    _scratch = np.zeros((2, 64, 16, 16), np.float32)

    def gather(self, sequence: int, layer: int) -> Any:
        keys, values = super().gather(sequence, layer)
        views = [part[tuple(slice(0, axis) for axis in keys.shape)] for part in self._scratch]
        views[0][...], views[1][...] = keys, values
        return views[0], views[1]


@mutant(
    "PAGED-07",
    also="EDIT-04 EDIT-05 EDIT-10 LAW-03 LAW-08 LAW-17 LAW-21 MOVE-05 PAGED-12 PAGED-13 PAGED-15 PAGED-18 SHARE-04"
    " SHARE-06 SHARE-08 SHARE-09 WIN-09",
    seen_in="kekzl/imp#1115",
)
class PagedLeaksABlock(kvref.PagedCache):
    """`drop` leaves one block per sequence allocated: a server has no free blocks after some thousand requests."""

    def drop(self, sequence: int) -> None:
        for block in self._tables.close(self._table(sequence))[1:]:
            self.pool.free(block)
        del self._table_of[sequence]


@mutant(
    "PAGED-09",
    also="EDIT-01 EDIT-02 EDIT-03 EDIT-04 EDIT-05 EDIT-06 EDIT-10 FMT-LEVEL-04 LAW-01 LAW-02 LAW-04 LAW-05 LAW-06"
    " LAW-07 LAW-08 LAW-10 LAW-13 LAW-14 LAW-15 LAW-17 LAW-20 MOVE-01 MOVE-03 MOVE-04 MOVE-05 PAGED-07 PAGED-08"
    " PAGED-10 PAGED-11 PAGED-12 PAGED-14 PAGED-16 PAGED-18 SHARE-03 SHARE-04 SHARE-05 SHARE-06 SHARE-07"
    " SHARE-08 SHARE-09 WIN-09",
    seen_in="vllm-project/vllm#43990",
)
class PagedLengthIsCapacity(kvref.PagedCache):
    """`length` returns the capacity instead of the number of tokens: old contents of unused slots are read as tokens."""

    def length(self, sequence: int, layer: int) -> int:
        super().length(sequence, layer)
        return self._tables.capacity(self._table(sequence))


@mutant(
    "PAGED-09",
    also="EDIT-10 LAW-02 MOVE-01 PAGED-11 PAGED-14 PAGED-18 SHARE-04 SHARE-05 SHARE-07 SHARE-08",
    seen_in="Pushkinist/rMLX#391",
)
class PagedOverwritingTruncates(kvref.PagedCache):
    """A write inside a sequence removes all tokens after the last token written."""

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        super().write(sequence, layer, start, keys, values)
        if len(keys):
            self._tables.lengths[self._table(sequence), layer] = int(start) + len(keys)


@mutant(
    "LAW-04",
    also="ATTN-10 EDIT-03 EDIT-05 EDIT-10 LAW-01 LAW-02 LAW-06 MOVE-05 PAGED-03 PAGED-11 PAGED-12 PAGED-14 PAGED-18"
    " SHARE-04 SHARE-05 SHARE-06 SHARE-08 SHARE-09 WIN-09",
    seen_in="vllm-project/vllm#50749",
)
class PagedPaddingOverwritesTheFirstTokens(kvref.PagedCache):
    """A write that ends inside a block is padded to the end of the block.

    The padding overwrites the first tokens of the sequence.
    """

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        super().write(sequence, layer, start, keys, values)
        end, size = start + len(keys), self.config.block_size
        padding = -end % size
        if start and len(keys) and padding:
            zeros = np.zeros((min(padding, start), *keys.shape[1:]), np.float32)
            super().write(sequence, layer, 0, zeros, zeros)


@mutant("LAW-05", also="EDIT-01", seen_in="vllm-project/vllm#35219")
class PagedReadsPastTheLength(kvref.PagedCache):
    """`read` accepts any position within the capacity: it returns what an earlier owner of the block wrote there."""

    def read(self, sequence: int, layer: int, positions: Any) -> Any:
        table, length = self._table(sequence), self.length(sequence, layer)
        if all(length <= position < self._tables.capacity(table) for position in positions):
            return self._store.read([self._tables.slots(table, layer, position) for position in positions])
        return super().read(sequence, layer, positions)


@mutant("PAGED-01", also="EDIT-03 EDIT-05 LAW-03 LAW-05 MOVE-03 PAGED-13 PAGED-16 PAGED-18 SHARE-03 SHARE-09 WIN-09")
class PagedSequenceIdsAreReused(kvref.PagedCache):
    """The id of a dropped sequence is reused for the next one: a canceled request reads another user's tokens."""

    def drop(self, sequence: int) -> None:
        super().drop(sequence)
        self._next_sequence = sequence


@mutant("PAGED-17", seen_in="gittensor-ai-lab/sparkinfer#185")
class PagedTablesEndInStaleBlocks(kvref.PagedCache):
    """In `block_tables` short tables are padded with block ids of other sequences instead of -1: a kernel reads their tokens."""

    def block_tables(self, sequences: Any, layer: int) -> Any:
        tables = super().block_tables(sequences, layer)
        return np.where(tables < 0, tables.max(axis=0, initial=-1), tables)


@mutant("WIN-09")
class PagedWindowFreesEarly(kvref.PagedCache):
    """`release_before` also frees the block that contains the first token of the window."""

    def release_before(self, sequence: int, position: int) -> None:
        table = self._table(sequence)
        super().release_before(sequence, position)
        entries = min(-(-position // self.config.block_size), self._tables.count(table))
        self.pool.free_many(self._tables.release(table, entries))


@mutant("WIN-09", also="LAW-11 MOVE-03 PAGED-12", seen_in="vllm-project/vllm#42571")
class PagedWindowFreesTwice(kvref.PagedCache):
    """Blocks freed by `release_before` stay in the block table: they are freed a second time when the sequence is dropped."""

    def release_before(self, sequence: int, position: int) -> None:
        table = self._table(sequence)
        super().release_before(sequence, position)
        self._tables.released[table] = 0

    def _check_position(self, table: int, position: int, stop: int | None, what: str) -> int:
        position = super()._check_position(table, position, stop, what)
        if self._tables.at(table, 0, position // self.config.block_size) < 0 and position < self._tables.lengths[table].max():
            raise kvref.errors.PositionOutOfRange(f"{what}: {position} was released")
        return position


@mutant("LAW-11", also="FMT-LEVEL-04 LAW-01 LAW-10 PAGED-18 SHARE-07")
class PagedWriteAllocatesBeforeItChecks(kvref.PagedCache):
    """`write` allocates blocks before it checks the layer: every invalid call costs memory."""

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        if isinstance(start, int) and 0 <= start <= self.length(sequence, 0):
            self.ensure_capacity(sequence, start + len(keys))
        super().write(sequence, layer, start, keys, values)


@mutant("SHARE-04", also="EDIT-04 EDIT-05 EDIT-10 PAGED-18 SHARE-05 SHARE-06 SHARE-07 SHARE-08")
class PagedWritesToSharedBlocks(kvref.PagedCache):
    """A write to a fork overwrites the shared block in place: every sample of a prompt reads the tokens of the last one."""

    def _needs_copy(self, blocks: Any) -> Any:
        return np.zeros(blocks.shape, bool)


@mutant("EDIT-10", seen_in="ggml-org/llama.cpp#4889")
class PagedRotatesTheWholeHead(kvref.PagedCache):
    """`remove` rotates all numbers of a head, also those that a partial rotary embedding does not rotate."""

    def remove(self, sequence: int, start: int, stop: int, frequencies: Any = None, layout: str = "halves") -> None:
        pairs = self.config.head_dim // 2
        if frequencies is not None and 1 <= len(frequencies) < pairs:
            frequencies = [*frequencies, *kvref.rotary_frequencies(2 * pairs)[len(frequencies) :]]
        super().remove(sequence, start, stop, frequencies, layout)


@mutant("EDIT-10", seen_in="lablup/mlxcel#1355")
class PagedRotatesWithoutScaledFrequencies(kvref.PagedCache):
    """`remove` rotates with the frequencies of one base, and ignores that a model lowers some of them (Llama 3.1, YaRN)."""

    def remove(self, sequence: int, start: int, stop: int, frequencies: Any = None, layout: str = "halves") -> None:
        if frequencies is not None and len(frequencies) > 1 and 0 < max(frequencies) < np.inf:
            frequencies = kvref.rotary_frequencies(2 * len(frequencies))
        super().remove(sequence, start, stop, frequencies, layout)


@mutant("EDIT-10", seen_in="ggml-org/llama.cpp#3825")
class PagedSecondShiftReplacesTheFirst(kvref.PagedCache):
    """Keys are rotated later, by the distance of the last `remove` instead of the sum of all distances since the last read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shifted: int | None = None  # the sequence that was edited last, until anything reads or writes

    def remove(self, sequence: int, start: int, stop: int, frequencies: Any = None, layout: str = "halves") -> None:
        again = frequencies is not None and self._shifted == sequence
        super().remove(sequence, start, stop, None if again else frequencies, layout)
        self._shifted = None if frequencies is None else sequence

    def gather(self, sequence: int, layer: int) -> Any:
        self._shifted = None
        return super().gather(sequence, layer)

    def read(self, sequence: int, layer: int, positions: Any) -> Any:
        self._shifted = None
        return super().read(sequence, layer, positions)
