"""Variants of kvref's caches that check a call's arguments in another order, for LAW-11.

Each method first collects every error of the call, and then raises the one that the implementation's `pick` selects.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import kvref
from kvref import errors
from kvref.backend import ReferenceBackend
from kvref_conformance.implementations.backends import OnBackend

Wrong = list[type[Exception]]
Pick = Callable[[Wrong], type[Exception]]


def of_arrays(shape: tuple[int | None, ...], *arrays: Any) -> Wrong:
    """Return the errors of each array: shape, dtype and values, independently of the other arrays."""
    wrong: Wrong = []
    for array in arrays:
        lengths = {part.shape[shape.index(None)] for part in arrays if part.ndim == len(shape)} if None in shape else set()
        fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
        wrong += [] if fits and len(lengths) < 2 else [errors.ShapeMismatch]
        wrong += [] if array.dtype in (np.float32, np.float16) else [errors.DtypeMismatch]
        wrong += [] if np.isfinite(array.astype(np.float32)).all() else [errors.NonFinite]
    return wrong


def count_of(shape: tuple[int | None, ...], *arrays: Any) -> int:
    return max((array.shape[shape.index(None)] for array in arrays if array.ndim == len(shape)), default=0)


def when(condition: Any, error: type[Exception]) -> Wrong:
    return [error] if condition else []


class Picky:
    """Base class: raises one of several errors of a call."""

    pick: Pick

    def refuse(self, *wrong: Wrong) -> None:
        if found := [error for part in wrong for error in part]:
            raise self.pick(found)("this is wrong, and other things may be")


class Contiguous(Picky, kvref.ContiguousCache):
    def append(self, keys: Any, values: Any) -> None:
        config = self.config
        shape = config.batch_size, config.num_kv_heads, None, config.head_dim
        too_many = self.seq_len + count_of(shape, keys, values) > config.max_seq_len
        self.refuse(of_arrays(shape, keys, values), when(too_many, errors.CapacityExceeded))
        super().append(keys, values)

    def append_fused(self, key_values: Any) -> None:
        config = self.config
        shape = 2, config.batch_size, config.num_kv_heads, None, config.head_dim
        too_many = self.seq_len + count_of(shape, key_values) > config.max_seq_len
        self.refuse(of_arrays(shape, key_values), when(too_many, errors.CapacityExceeded))
        super().append_fused(key_values)


class Paged(Picky, kvref.PagedCache):
    def of_place(self, sequence: int, layer: int) -> Wrong:
        known = when(sequence not in self._table_of, errors.SequenceNotFound)
        return known + when(not 0 <= layer < self.config.num_layers, errors.LayerOutOfRange)

    def short(self, sequence: int, tokens: int) -> Wrong:
        if sequence not in self._table_of:
            return []  # an unknown sequence has no table
        more = -(-tokens // self.config.block_size) - len(self.block_table(sequence, 0))
        return when(more * self.config.num_layers > self.num_free_blocks, errors.OutOfBlocks)

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        negative = when(num_tokens < 0, errors.PositionOutOfRange)
        self.refuse(self.of_place(sequence, 0), negative, self.short(sequence, num_tokens))
        super().ensure_capacity(sequence, num_tokens)

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        shape, place = (None, self.config.num_kv_heads, self.config.head_dim), self.of_place(sequence, layer)
        bad_start = when(start < 0 or (not place and start > self.length(sequence, layer)), errors.PositionOutOfRange)
        count = count_of(shape, keys, values)
        short = self.short(sequence, max(0, start) + count) if count else []
        self.refuse(place, bad_start, of_arrays(shape, keys, values), short)
        super().write(sequence, layer, start, keys, values)

    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        shape = len(sequences), self.config.num_kv_heads, self.config.head_dim
        places = [error for sequence in sequences for error in self.of_place(sequence, layer)]
        places += when(not 0 <= layer < self.config.num_layers, errors.LayerOutOfRange)
        self.refuse(places, of_arrays(shape, keys, values), [] if places else self.short_batch(sequences, [layer]))
        super().append(sequences, layer, keys, values)

    def append_step(self, sequences: Any, keys: Any, values: Any) -> None:
        layers = range(self.config.num_layers)
        shape = len(layers), len(sequences), self.config.num_kv_heads, self.config.head_dim
        places = [error for sequence in sequences for error in self.of_place(sequence, 0)]
        self.refuse(places, of_arrays(shape, keys, values), self.short_batch(sequences, layers))
        super().append_step(sequences, keys, values)

    def short_batch(self, sequences: Any, layers: Any) -> Wrong:
        """OutOfBlocks if the existing sequences of the batch need more blocks than are free."""
        more = 0
        for sequence in set(sequences) & set(self._table_of):
            tokens = max(self.length(sequence, layer) for layer in layers) + list(sequences).count(sequence)
            more += max(0, -(-tokens // self.config.block_size) - len(self.block_table(sequence, 0)))
        return when(more * self.config.num_layers > self.num_free_blocks, errors.OutOfBlocks)

    def read(self, sequence: int, layer: int, positions: Any) -> Any:
        place = self.of_place(sequence, layer)
        stop = 10**9 if place else self.length(sequence, layer)
        self.refuse(place, [errors.PositionOutOfRange for position in positions if not 0 <= position < stop])
        return super().read(sequence, layer, positions)

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        place, negative = self.of_place(sequence, layer), start < 0 or count < 0
        past = not place and start + count > len(self.block_table(sequence, layer)) * self.config.block_size
        self.refuse(place, when(negative or past, errors.PositionOutOfRange))
        return super().slot_mapping(sequence, layer, start, count)

    def gather(self, sequence: int, layer: int) -> Any:
        self.refuse(self.of_place(sequence, layer))
        return super().gather(sequence, layer)

    def attend(self, sequence: int, layer: int, query: Any, scale: float) -> Any:
        config = self.config
        misshapen = query.ndim != 3 or query.shape[2] != config.head_dim or query.shape[1] % config.num_kv_heads
        self.refuse(self.of_place(sequence, layer), when(misshapen, errors.ShapeMismatch))
        return super().attend(sequence, layer, query, scale)


class Quantized(Picky, kvref.QuantizedCache):
    def full(self, layers: Any, count: int) -> Wrong:
        return when(any(self.length(layer) + count > self.config.capacity for layer in layers), errors.CapacityExceeded)

    def append(self, layer: int, keys: Any, values: Any) -> None:
        there, shape = 0 <= layer < self.config.num_layers, (None, self.config.num_kv_heads, self.config.head_dim)
        full = self.full([layer], count_of(shape, keys, values)) if there else []
        self.refuse(when(not there, errors.LayerOutOfRange), of_arrays(shape, keys, values), full)
        super().append(layer, keys, values)

    def append_step(self, keys: Any, values: Any) -> None:
        shape = self.config.num_layers, self.config.num_kv_heads, self.config.head_dim
        self.refuse(of_arrays(shape, keys, values), self.full(range(self.config.num_layers), 1))
        super().append_step(keys, values)

    def read_head(self, layer: int, position: int, head: int) -> Any:
        there = 0 <= layer < self.config.num_layers
        outside = position < 0 or (there and position >= self.length(layer))
        self.refuse(
            when(not there, errors.LayerOutOfRange), when(outside, errors.PositionOutOfRange),
            when(not 0 <= head < self.config.num_kv_heads, errors.HeadOutOfRange),
        )  # fmt: skip
        return super().read_head(layer, position, head)


class Tiered(Picky, kvref.TieredCache):
    def append(self, keys: Any, values: Any) -> None:
        self.refuse(of_arrays((None, self.config.num_kv_heads, self.config.head_dim), keys, values))
        super().append(keys, values)


class Pooled(Picky, kvref.PooledCache):
    def append(self, keys: Any, values: Any) -> None:
        config = self.config
        shape = None, config.num_kv_heads, config.head_dim
        count = count_of(shape, keys, values)
        blocks = [-(-tokens // config.tokens_per_block) for tokens in (self.total_tokens, self.total_tokens + count)]
        too_large = 4 * config.tokens_per_block * config.num_kv_heads * config.head_dim > 256 * 1024
        self.refuse(of_arrays(shape, keys, values), when(too_large and blocks[1] > blocks[0], errors.BufferTooLarge))
        super().append(keys, values)


class Windowed(Picky, kvref.WindowedCache):
    def of_tokens(self, keys: Any, values: Any) -> Wrong:
        return of_arrays((None, self.config.num_kv_heads, self.config.head_dim), keys, values)

    def append(self, keys: Any, values: Any) -> None:
        self.refuse(self.of_tokens(keys, values))
        super().append(keys, values)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        counted = keys.ndim == query.ndim == 3 and len(query) == len(keys)
        misshapen = not counted or query.shape[2] != dim or query.shape[1] % heads
        of_query = when(misshapen, errors.ShapeMismatch) + when(query.dtype == np.float64, errors.DtypeMismatch)
        self.refuse(of_query, self.of_tokens(keys, values))
        return super().step(query, keys, values, scale)


class Latent(Picky, kvref.LatentCache):
    def append(self, latent: Any, rope: Any) -> None:
        config = self.config
        count = max(count_of((None, config.rank), latent), count_of((None, config.rope_dim), rope))
        wrong = of_arrays((None, config.rank), latent) + of_arrays((None, config.rope_dim), rope)
        wrong += when(latent.shape[:1] != rope.shape[:1], errors.ShapeMismatch)
        self.refuse(wrong, when(self.length + count > config.max_tokens, errors.CapacityExceeded))
        super().append(latent, rope)


class Channels(Picky, kvref.ChannelCache):
    def append(self, keys: Any, values: Any) -> None:
        shape = None, self.config.num_kv_heads, self.config.head_dim
        too_many = self.length + count_of(shape, keys, values) > self.config.max_tokens
        self.refuse(when(too_many, errors.CapacityExceeded), of_arrays(shape, keys, values))
        super().append(keys, values)


class Grouped(Picky, kvref.GroupedCache):
    def of_place(self, sequence: int, layer: int = 0) -> Wrong:
        known = when(sequence not in self._table_of, errors.SequenceNotFound)
        return known + when(not 0 <= layer < self.config.num_layers, errors.LayerOutOfRange)

    def step(self, sequence: int, keys: Any, values: Any) -> None:
        config = self.config
        shape = config.num_layers, None, config.num_kv_heads, config.head_dim
        self.refuse(of_arrays(shape, keys, values), self.of_place(sequence))
        super().step(sequence, keys, values)

    def read(self, sequence: int, layer: int, positions: Any) -> Any:
        place = self.of_place(sequence, layer)
        stop = 10**9 if sequence not in self._table_of else self.length(sequence)
        self.refuse([errors.PositionOutOfRange for position in positions if not 0 <= position < stop], place)
        return super().read(sequence, layer, positions)


class Recurrent(Picky, kvref.RecurrentCache):
    def of_sequences(self, *sequences: int) -> Wrong:
        return [errors.SequenceNotFound for sequence in sequences if sequence not in self._sequences]

    def of_tokens(self, first: tuple[int | None, ...], arrays: tuple[Any, ...]) -> Wrong:
        """The errors of inputs, keys, values and gates, independently of each other, and of their numbers of tokens."""
        config, heads = self.config, self.config.num_heads
        widths, at, wrong = (config.channels, config.key_dim, config.value_dim, 2), first.index(None), list[type[Exception]]()
        for array, width in zip(arrays, widths, strict=True):
            wrong += of_arrays((*first, heads, width), array)
        counts = {array.shape[at] for array in arrays if array.ndim == len(first) + 2}
        return wrong + when(len(counts) > 1, errors.ShapeMismatch)

    def append(self, sequence: int, inputs: Any, keys: Any, values: Any, gates: Any) -> None:
        arrays = inputs, keys, values, gates
        self.refuse(self.of_tokens((self.config.num_layers, None), arrays), self.of_sequences(sequence))
        super().append(sequence, *arrays)

    def append_batch(self, sequences: Any, counts: Any, inputs: Any, keys: Any, values: Any, gates: Any) -> None:
        arrays, shape = (inputs, keys, values, gates), (self.config.num_layers, len(sequences), None)
        width = max((array.shape[2] for array in arrays if array.ndim == 5), default=0)
        outside = [errors.PositionOutOfRange for count in counts if not 0 <= count <= width]
        wrong = self.of_tokens(shape, arrays) + when(len(counts) != len(sequences), errors.ShapeMismatch)
        others = outside + self.of_sequences(*sequences)
        if {*wrong, *others} - {errors.NonFinite}:  # padding may be NaN
            self.refuse(wrong, others)
        super().append_batch(sequences, counts, *arrays)

    def of_place(self, sequence: int, layer: int) -> Wrong:
        there = 0 <= layer < self.config.num_layers
        return when(not there, errors.LayerOutOfRange) + self.of_sequences(sequence)

    def read_matrix(self, sequence: int, layer: int) -> Any:
        self.refuse(self.of_place(sequence, layer))
        return super().read_matrix(sequence, layer)

    def apply(self, sequence: int, layer: int, query: Any) -> Any:
        fits = query.ndim == 3 and query.shape[1:] == (self.config.num_heads, self.config.key_dim)
        self.refuse(when(not fits, errors.ShapeMismatch), self.of_place(sequence, layer))
        return super().apply(sequence, layer, query)

    def commit(self, sequence: int, tokens: Any) -> None:
        known, found = sequence in self._sequences, self._sequences.get(sequence)
        committed = [] if found is None else found.committed.tokens
        too_many = found is not None and len(tokens) > found.length
        differs = any(a != b for a, b in zip(tokens, committed, strict=False))
        self.refuse(
            when(differs, errors.TokenMismatch), when(too_many, errors.PositionOutOfRange),
            when(any(not 0 <= token < 2**63 for token in tokens), errors.TokenOutOfRange),
            when(not known, errors.SequenceNotFound),
        )  # fmt: skip
        super().commit(sequence, tokens)


class Sharded(Picky, kvref.ShardedCache):
    def lost(self) -> Wrong:
        return when(None in self._ranks, errors.RankLost)

    def append(self, keys: Any, values: Any) -> None:
        shape = None, self.config.num_kv_heads, self.config.head_dim
        too_many = self.length + count_of(shape, keys, values) > self.config.max_tokens
        self.refuse(self.lost(), when(too_many, errors.CapacityExceeded), of_arrays(shape, keys, values))
        super().append(keys, values)

    def attend(self, query: Any, scale: float) -> Any:
        misshapen = query.ndim != 3 or query.shape[2] != self.config.head_dim or query.shape[1] % self.config.num_kv_heads
        too_many = query.ndim == 3 and len(query) > self.length
        self.refuse(self.lost(), when(too_many, errors.PositionOutOfRange), when(misshapen, errors.ShapeMismatch))
        return super().attend(query, scale)

    def truncate(self, length: int) -> None:
        self.refuse(self.lost(), when(not 0 <= length <= self.length, errors.PositionOutOfRange))
        super().truncate(length)


class Transfer(Picky, kvref.TransferCache):
    def outside(self, span: Any, stop: int, error: type[Exception]) -> Wrong:
        return when(not 0 <= span[0] <= span[1] <= stop, error)

    def append(self, sequence: int, keys: Any, values: Any) -> None:
        config, known = self.config, sequence in self._table_of
        shape = config.num_layers, None, config.num_kv_heads, config.head_dim
        end = count_of(shape, keys, values) + (self.length(sequence) if known else 0)
        entries = self._tables.count(self._table_of[sequence]) if known else 0
        short = config.num_layers * (-(-end // config.block_size) - entries) > self.num_free_blocks
        unknown = when(not known, errors.SequenceNotFound)
        self.refuse(when(short and known, errors.OutOfBlocks), unknown, of_arrays(shape, keys, values))
        super().append(sequence, keys, values)

    def begin(self, length: int, deadline: int | None = None) -> int:
        short = self.config.num_layers * -(-length // self.config.block_size) > self.num_free_blocks
        self.refuse(
            when(short, errors.OutOfBlocks), when(deadline is not None and deadline < 0, errors.ConfigError),
            when(length < 0, errors.PositionOutOfRange),
        )  # fmt: skip
        return super().begin(length, deadline)

    def of_part(self, found: Any, layer: int, start: int, heads: Any, keys: Any, values: Any) -> Wrong:
        shape = None, max(0, heads[1] - heads[0]), self.config.head_dim
        length = 10**9 if found is None else found.arrived.shape[1]
        span = start, start + count_of(shape, keys, values)
        wrong = self.outside(heads, self.config.num_kv_heads, errors.HeadOutOfRange) + of_arrays(shape, keys, values)
        wrong += when(found is None, errors.TransferNotFound) + self.outside(span, length, errors.PositionOutOfRange)
        return wrong + when(not 0 <= layer < self.config.num_layers, errors.LayerOutOfRange)

    def arrive(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        found = self._open.get(transfer)
        wrong = self.of_part(found, layer, start, heads, keys, values)
        if found is not None and not {errors.LayerOutOfRange, errors.PositionOutOfRange, errors.HeadOutOfRange} & {*wrong}:
            count = max(len(each) for each in (keys, values))
            arrived = found.arrived[layer, start : start + count, heads[0] : heads[1]].any()
            wrong = when(arrived, errors.AlreadyArrived) + wrong
        self.refuse(wrong)
        super().arrive(transfer, layer, start, heads, keys, values)

    def write_late(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        self.refuse(self.of_part(self._aborted.get(transfer), layer, start, heads, keys, values))
        super().write_late(transfer, layer, start, heads, keys, values)

    def send(self, handle: int, layer: int, tokens: Any, heads: Any) -> Any:
        known = handle in self._exports
        length = int(self._tables.lengths[self._exports[handle], 0]) if known else 10**9
        self.refuse(
            self.outside(tokens, length, errors.PositionOutOfRange), when(not known, errors.ExportNotFound),
            self.outside(heads, self.config.num_kv_heads, errors.HeadOutOfRange),
            when(not 0 <= layer < self.config.num_layers, errors.LayerOutOfRange),
        )  # fmt: skip
        return super().send(handle, layer, tokens, heads)


class Ragged(Picky, kvref.RaggedCache):
    def of_tokens(self, rows: int, start: Any, keys: Any, values: Any, counts: Any) -> Wrong:
        shape = rows, self.config.num_kv_heads, None, self.config.head_dim
        columns = count_of(shape, keys, values)
        counted = [columns] * rows if counts is None else list(counts)
        wrong = when(any(not 0 <= count <= columns for count in counted), errors.PositionOutOfRange)
        wrong += when(len(counted) != rows, errors.ShapeMismatch)
        if not wrong:
            too_many = any(old + new > self.config.max_tokens for old, new in zip(start, counted, strict=True))
            wrong += when(too_many, errors.CapacityExceeded)
        finite = all(array.dtype == np.float64 or np.isfinite(array).all() for array in (keys, values))
        shaped = of_arrays(shape, keys, values)
        return wrong + [error for error in shaped if error is not errors.NonFinite or not (finite or counts)]

    def append(self, keys: Any, values: Any, counts: Any = None, left: bool = False) -> None:
        lengths = [self.length(row) for row in range(self.batch_size)]
        self.refuse(self.of_tokens(self.batch_size, lengths, keys, values, counts))
        super().append(keys, values, counts, left)

    def trim(self, counts: Any) -> None:
        lengths = [self.length(row) for row in range(self.batch_size)]
        too_many = any(not 0 <= count <= length for count, length in zip(counts, lengths, strict=False))
        self.refuse(
            when(too_many and len(counts) == len(lengths), errors.PositionOutOfRange),
            when(len(counts) != len(lengths), errors.ShapeMismatch),
        )
        super().trim(counts)


class Tree(Picky, kvref.TreeCache):
    def of_rows(self, sequence: int, *arrays: Any) -> Wrong:
        """The errors of rows that are added to a sequence."""
        shape, known = (None, self.config.num_kv_heads, self.config.head_dim), sequence in self._parents
        stored = self._rows.length(sequence, 0) if known else 0
        full, size = -(-(stored + count_of(shape, *arrays)) // self.config.block_size), self.config.block_size
        short = known and full - -(-stored // size) > self.num_free_blocks
        unknown = when(not known, errors.SequenceNotFound)
        return when(short, errors.OutOfBlocks) + unknown + of_arrays(shape, *arrays)

    def open_tree(self, sequence: int) -> Wrong:
        return when(self._parents.get(sequence), errors.InUse)

    def outside(self, nodes: Any, stop: int, grows: int = 0) -> Wrong:
        wrong = any(not -1 <= node < stop + grows * at for at, node in enumerate(nodes))
        return when(wrong, errors.PositionOutOfRange)

    def append(self, sequence: int, keys: Any, values: Any) -> None:
        self.refuse(self.of_rows(sequence, keys, values), self.open_tree(sequence))
        super().append(sequence, keys, values)

    def draft(self, sequence: int, keys: Any, values: Any, parents: Any) -> list[int]:
        rows = self.of_rows(sequence, keys, values)
        count = when(errors.ShapeMismatch not in rows and len(parents) != len(keys), errors.ShapeMismatch)
        stop = len(self._parents[sequence]) if sequence in self._parents else 10**9
        self.refuse(count, self.outside(parents, stop, 1), rows)
        return super().draft(sequence, keys, values, parents)

    def truncate(self, sequence: int, length: int) -> None:
        known = sequence in self._parents
        wrong = when(known and not 0 <= length <= self.length(sequence), errors.PositionOutOfRange)
        self.refuse(wrong, self.open_tree(sequence), when(not known, errors.SequenceNotFound))
        super().truncate(sequence, length)

    def attend(self, sequence: int, nodes: Any, query: Any, scale: float | None = None) -> Any:
        known, shape = sequence in self._parents, (None, query.shape[1] if query.ndim == 3 else 0, self.config.head_dim)
        wrong = [each for each in of_arrays(shape, query) if each is not errors.NonFinite]
        wrong += when(query.ndim == 3 and query.shape[1] % self.config.num_kv_heads, errors.ShapeMismatch)
        wrong += when(not wrong and len(nodes) != len(query), errors.ShapeMismatch)
        stop = len(self._parents[sequence]) if known else 10**9
        self.refuse(self.outside(nodes, stop), wrong, when(not known, errors.SequenceNotFound))
        return super().attend(sequence, nodes, query, scale)


class Cross(Picky, kvref.CrossCache):
    def of_entries(self, rows: int, most: int, start: Any, keys: Any, values: Any, counts: Any) -> Wrong:
        shape = rows, self.config.num_kv_heads, None, self.config.head_dim
        columns = count_of(shape, keys, values)
        counted = [columns] * rows if counts is None else list(counts)
        wrong = when(any(not 0 <= count <= columns for count in counted), errors.PositionOutOfRange)
        wrong += when(len(counted) != rows, errors.ShapeMismatch)
        if not wrong:
            wrong += when(any(old + new > most for old, new in zip(start, counted, strict=True)), errors.CapacityExceeded)
        finite = all(array.dtype == np.float64 or np.isfinite(array).all() for array in (keys, values))
        shaped = of_arrays(shape, keys, values)
        return wrong + [error for error in shaped if error is not errors.NonFinite or not (finite or counts)]

    def write_source(self, rows: Any, keys: Any, values: Any, counts: Any = None) -> None:
        known = [row for row in rows if 0 <= row < self.batch_size]
        written = any(self._sources[row] is not None for row in known) or len(set(known)) < len(known)
        self.refuse(
            self.of_entries(len(rows), self.config.max_source, [0] * len(rows), keys, values, counts),
            when(len(known) < len(rows), errors.RowOutOfRange),
            when(written, errors.SourceAlreadyWritten),
        )
        super().write_source(rows, keys, values, counts)

    def append(self, keys: Any, values: Any, counts: Any = None) -> None:
        lengths = [self.length(row) for row in range(self.batch_size)]
        self.refuse(self.of_entries(self.batch_size, self.config.max_tokens, lengths, keys, values, counts))
        super().append(keys, values, counts)


class Compressed(Picky, kvref.CompressedCache):
    def of_tokens(self, sequence: int, *arrays: Any) -> Wrong:
        shape = None, self.config.head_dim
        length = self.length(sequence) if sequence in self._sequences else 0
        full = length + count_of(shape, *arrays) > self.config.max_tokens
        unknown = when(sequence not in self._sequences, errors.SequenceNotFound)
        return when(full, errors.CapacityExceeded) + unknown + of_arrays(shape, *arrays)

    def append(self, sequence: int, latents: Any, contributions: Any, gates: Any) -> None:
        self.refuse(self.of_tokens(sequence, latents, contributions, gates))
        super().append(sequence, latents, contributions, gates)

    def step(self, sequence: int, query: Any, latents: Any, contributions: Any, gates: Any, scale: float | None = None) -> Any:
        shape = None, query.shape[1] if query.ndim == 3 else 0, self.config.head_dim
        wrong = of_arrays(shape, query)
        wrong += when(not wrong and latents.ndim == 2 and len(query) != len(latents), errors.ShapeMismatch)
        self.refuse(wrong, self.of_tokens(sequence, latents, contributions, gates))
        return super().step(sequence, query, latents, contributions, gates, scale)

    def truncate(self, sequence: int, length: int) -> None:
        known = sequence in self._sequences
        wrong = when(known and not 0 <= length <= self.length(sequence), errors.PositionOutOfRange)
        self.refuse(wrong, when(not known, errors.SequenceNotFound))
        super().truncate(sequence, length)

    def fork(self, sequence: int) -> int:
        unknown = when(sequence not in self._sequences, errors.SequenceNotFound)
        self.refuse(when(not self.num_free_blocks, errors.OutOfBlocks), unknown)
        return super().fork(sequence)

    def restore(self, handle: int) -> int:
        self.refuse(when(not self.num_free_blocks, errors.OutOfBlocks), when(handle not in self._copies, errors.KeyNotFound))
        return super().restore(handle)


class Implementation(OnBackend):
    """pick: selects which error of a call to raise."""

    def __init__(self, pick: Pick) -> None:
        super().__init__(ReferenceBackend())
        self.pick = pick

    def _made(self, cache: Any) -> Any:
        cache.pick = self.pick
        return cache

    def contiguous(self, **config: Any) -> Any:
        return self._made(Contiguous(kvref.ContiguousConfig(**config)))

    def paged(self, **config: Any) -> Any:
        return self._made(Paged(kvref.PagedConfig(**config)))

    def quantized(self, **config: Any) -> Any:
        return self._made(Quantized(kvref.QuantizedConfig(**config)))

    def tiered(self, **config: Any) -> Any:
        return self._made(Tiered(kvref.TieredConfig(**config)))

    def windowed(self, **config: Any) -> Any:
        return self._made(Windowed(kvref.WindowedConfig(**config)))

    def channels(self, **config: Any) -> Any:
        return self._made(Channels(kvref.ChannelConfig(**config)))

    def latent(self, **config: Any) -> Any:
        return self._made(Latent(kvref.LatentConfig(**config)))

    def grouped(self, **config: Any) -> Any:
        return self._made(Grouped(kvref.GroupedConfig(**config)))

    def sharded(self, **config: Any) -> Any:
        return self._made(Sharded(kvref.ShardedConfig(**config)))

    def transfer(self, **config: Any) -> Any:
        return self._made(Transfer(kvref.TransferConfig(**config)))

    def cross(self, **config: Any) -> Any:
        return self._made(Cross(kvref.CrossConfig(**config)))

    def compressed(self, **config: Any) -> Any:
        return self._made(Compressed(kvref.CompressedConfig(**config)))

    def ragged(self, **config: Any) -> Any:
        return self._made(Ragged(kvref.RaggedConfig(**config)))

    def tree(self, **config: Any) -> Any:
        return self._made(Tree(kvref.TreeConfig(**config)))

    def recurrent(self, **config: Any) -> Any:
        return self._made(Recurrent(kvref.RecurrentConfig(**config)))

    def pooled(self, pool: Any = None, **config: Any) -> Any:
        return self._made(Pooled(kvref.PooledConfig(**config), pool, self.backend))
