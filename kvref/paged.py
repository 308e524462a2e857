"""The paged cache: sequences of tokens in blocks of one pool, as in PagedAttention.

There is one store of num_blocks * block_size slots for keys and one for values, shared by all layers and sequences. The block
tables of a sequence determine the slot of each token: position p of a layer is in the table's entry p // block_size, at offset
p % block_size (PAGED-06). A token is quantized once, when it is written. Its slot contains its codes, scale and zero (PAGED-18).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvref import serialization
from kvref.array import Array
from kvref.attention import attention_as_read
from kvref.backend import Backend, reference
from kvref.block_sequences import PagedSequences
from kvref.block_tables import NO_BLOCK
from kvref.errors import ConfigError, NonFinite, PositionOutOfRange, in_range, whole_fields
from kvref.formats import Format, Quantized, of_keys_and_values
from kvref.partial_load import Part, PendingLoad, SavedSequence, Span, read_part
from kvref.rope import Rotary
from kvref.snapshot import Contents, TokenSpan, key_and_value_spans, shape_of
from kvref.token_store import TokenStore
from kvref.validation import accept_pair


@dataclass(frozen=True)
class PagedConfig:
    """Sizes and formats of a PagedCache. Raises ConfigError (LAW-12).

    - `num_blocks`: blocks in the pool, 0 or more. A block is for one layer: a sequence of n tokens has
      num_layers * ceil(n / block_size) blocks.
    - `block_size`: tokens per block.
    - `dtype`: the name of any format (FMT). If it has groups, `head_dim` must be a multiple of the group. Engines call this the
      cache type or kv_cache_dtype.
    - `key_scale`, `value_scale`: the scales of all keys and of all values, in static formats only (FMT-STATIC), there 1.0 by
      default. In all other formats they must be None.

    In vLLM a block id stands for one block in every layer (of a group, if layers differ): a pool of num_gpu_blocks ids there has
    num_layers * num_gpu_blocks blocks here. vLLM reserves one id, the null block.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"
    key_scale: float | None = None
    value_scale: float | None = None

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", minimum=0)
        whole_fields(self, "num_layers", "num_kv_heads", "head_dim", "block_size")
        for format in self.formats:
            format.code_width(self.head_dim)  # raises ConfigError unless head_dim is a multiple of the group

    @property
    def formats(self) -> tuple[Format, Format]:
        """The format of keys and the format of values. They differ in a given scale only."""
        return of_keys_and_values(self.dtype, self.key_scale, self.value_scale, argument="dtype")


class PagedCache(PagedSequences):
    """A paged cache of many sequences (chapters PAGED, SHARE and EDIT).

    The cache owns one store, with a slot for each token of each block. It adds tokens to what PagedSequences manages: a method
    determines the slots of positions from the block tables, and then reads or writes these slots. Every method that writes does
    the same steps: check the arguments, quantize the tokens, make their blocks writable, write the slots, set the length. The
    first three can raise, and nothing has changed then.

    `create` returns the id of an empty sequence, `write` and `append` store tokens, `gather` and `read` return them, `attend`
    computes attention over them, and `drop` frees their blocks. `fork` shares the blocks of a sequence with a new one; a shared
    block is copied before a write to it. Blocks are allocated for all layers at once, and a call that needs more blocks than are
    free changes nothing.

    Keys and values are passed as float32, float16 or bfloat16 arrays, and returned as float32. In every method, `sequence` is an
    id that `create` or `fork` returned, and `layer` is in `[0, num_layers)`; otherwise the method raises SequenceNotFound or
    LayerOutOfRange.
    """

    def __init__(self, config: PagedConfig, backend: Backend = reference) -> None:
        """Allocate memory for all blocks on the device of `backend`."""
        super().__init__(config.num_blocks, config.num_layers, config.block_size, backend)
        self.config = config
        slots = config.num_blocks * config.block_size
        of_keys, of_values = config.formats
        self._store = TokenStore(backend, of_keys, slots, config.num_kv_heads, config.head_dim, of_values)
        self._pending_loads: dict[int, PendingLoad] = {}  # by sequence: new contents of which only some parts are loaded

    def drop(self, sequence: int) -> None:
        """Remove a sequence, and one reference to each block in its tables (PAGED-07). Raises SequenceNotFound.

        Blocks without references are free afterwards. So are the blocks of parts that were loaded (MOVE-05).
        """
        super().drop(sequence)
        self._discard_pending_load(sequence)

    def remove(
        self, sequence: int, start: int, stop: int, frequencies: Sequence[float] | None = None, layout: str = "halves"
    ) -> None:
        """Remove the tokens `[start, stop)` of every layer, and move the later tokens forward by stop - start (EDIT-10).

        frequencies: of the rotary embedding that keys contain, in radians per position, or None. With frequencies, each key that
        moves is rotated by -(stop - start) positions and quantized again. Everything else moves bit for bit. layout: which
        numbers of a head are rotated together, "halves" or "pairs" (see `kvref.rope`).

        Raises PositionOutOfRange unless 0 <= start <= stop <= the length of every layer, or if `start` is released, ConfigError
        for invalid `frequencies` or an unknown `layout` with frequencies, NonFinite if the format cannot store a rotated key,
        OutOfBlocks if there is no room for copies of shared blocks, and SequenceNotFound. If it raises, nothing has changed.
        """
        table = self._table(sequence)
        stop = in_range(stop, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "stop")
        start = self._check_position(table, start, stop + 1, "start")
        rotary = None if frequencies is None else Rotary(self.config.head_dim, frequencies, layout)
        if start == stop:
            return
        lengths = self._tables.lengths[table] - (stop - start)
        layers, positions = np.concatenate(
            [np.stack([np.full(length - start, layer), np.arange(start, length)]) for layer, length in enumerate(lengths)], axis=1
        )
        sources = positions + stop - start
        keys = None if rotary is None else self._rotate_keys(rotary, start - stop, self._tables.slots(table, layers, sources))
        self._make_writable({}, table, layers, positions)
        old, new = (self._tables.slots(table, layers, each) for each in (sources, positions))
        self._store.copy(old, new)
        if keys is not None:
            self._store.keys.put(new, keys)
        self._set_lengths(table, lengths)

    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None:
        """Write n tokens to the positions `[start, start + n)` of one layer, and allocate the missing blocks in every layer.

        keys, values: [n, num_kv_heads, head_dim]. `start` is at most the length of the layer, because sequences have no gaps
        (PAGED-10). Tokens at these positions are overwritten (PAGED-11). Shared blocks are copied first (SHARE-05).

        Raises ShapeMismatch, DtypeMismatch, NonFinite if the format cannot store a number, PositionOutOfRange for `start`,
        OutOfBlocks, SequenceNotFound or LayerOutOfRange. If it raises, nothing has changed.
        """
        table, layer = self._table(sequence), self._layer(layer)
        length = int(self._tables.lengths[table, layer])
        start = self._check_position(table, start, length + 1, "start")
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        end = start + keys.shape[0]
        positions = np.arange(start, end)
        new = self._store.quantized(keys, values)  # before blocks are allocated, because it can raise
        self._make_writable(self._missing_entries(table, end), table, layer, positions)
        self._store.put(self._tables.slots(table, layer, positions), new)
        self._tables.lengths[table, layer] = max(length, end)

    def append(self, sequences: Sequence[int], layer: int, keys: Array, values: Array) -> None:
        """Append one token to each of B sequences in one layer: to all or none.

        keys, values: [B, num_kv_heads, head_dim]. The result is that of B calls of `write`, each at the length of its sequence
        (PAGED-16). A sequence can be named several times. Raises as `write` does.
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        shape = (len(tables), self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        new = self._store.quantized(keys, values)
        positions = self._tables.lengths[tables, layer] + _earlier_occurrences(sequences)
        self._make_writable(self._missing_entries_of_batch(tables, positions + 1), tables, layer, positions)
        self._store.put(self._tables.slots(tables, layer, positions), new)
        self._tables.lengths[tables, layer] = positions + 1  # of a table that occurs several times, the last and largest counts

    def append_step(self, sequences: Sequence[int], keys: Array, values: Array) -> None:
        """Append one token to each of B sequences in every layer: to all or none (PAGED-16).

        keys, values: [num_layers, B, num_kv_heads, head_dim]. One scatter writes all layers. Raises as `append` does.
        """
        tables, config = self._tables_of(sequences), self.config
        shape = (config.num_layers, len(tables), config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        tokens = (config.num_layers * len(tables), config.num_kv_heads, config.head_dim)
        new = self._store.quantized(*(self._backend.xp.reshape(each, tokens) for each in (keys, values)))
        positions = self._tables.lengths[tables] + _earlier_occurrences(sequences)[:, None]  # [B, num_layers]
        step = tables[:, None], np.arange(config.num_layers), positions
        self._make_writable(self._missing_entries_of_batch(tables, positions.max(axis=1) + 1), *step)
        self._store.put(self._tables.slots(*step).T.reshape(-1), new)
        self._tables.lengths[tables] = positions + 1

    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Return the keys and values at `positions`, in their order: float32 [n, num_kv_heads, head_dim] each (PAGED-12).

        A position can occur more than once. Raises PositionOutOfRange unless every position is in `[0, length)` and not released,
        SequenceNotFound or LayerOutOfRange.
        """
        table, layer = self._table(sequence), self._layer(layer)
        length, what = int(self._tables.lengths[table, layer]), f"position in sequence {sequence}, layer {layer}"
        wanted = np.array([self._check_position(table, position, length, what) for position in positions], np.int64)
        return self._store.read(self._tables.slots(table, layer, wanted))

    def gather(self, sequence: int, layer: int) -> tuple[Array, Array]:
        """Return the keys and values of all tokens of a layer, in order: float32 [n, num_kv_heads, head_dim] each (PAGED-12).

        n is the length of the layer, less its released positions. Raises SequenceNotFound or LayerOutOfRange.
        """
        table, layer, positions = self._layer_positions(sequence, layer)
        return self._store.read(self._tables.slots(table, layer, positions))

    def gather_batch(self, sequences: Sequence[int], layer: int) -> tuple[Array, Array, Array]:
        """Return the tokens of B sequences in one layer, concatenated (PAGED-17).

        Returns keys and values, float32 [total, num_kv_heads, head_dim], and offsets, int32 [B + 1]. The tokens of sequence i are
        at `[offsets[i], offsets[i + 1])`, as kernels expect a batch of different lengths. Raises SequenceNotFound or
        LayerOutOfRange.
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        first = self._tables.first(tables)[:, layer]
        counts = self._tables.lengths[tables, layer] - first
        offsets = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
        keys, values = self._store.read(self._tables.slots(np.repeat(tables, counts), layer, positions))
        return keys, values, self._backend.asarray(offsets.astype(np.int32))

    def attend(self, sequence: int, layer: int, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return attention over the tokens of a layer: float32 [num_queries, num_query_heads, head_dim] (ATTN-10).

        query: [num_queries, num_query_heads, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are those of
        the last tokens, and each sees the tokens up to its own; otherwise each sees all tokens. Attention is over the keys and
        values that `gather` returns.

        Raises ShapeMismatch, DtypeMismatch, SequenceNotFound or LayerOutOfRange.
        """
        table, layer, positions = self._layer_positions(sequence, layer)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(self._tables.slots(table, layer, positions[start:stop]))

        row = self.config.num_kv_heads, self.config.head_dim
        return attention_as_read(query, read, len(positions), row, scale=scale, causal=causal, backend=self._backend)

    def save(self, sequence: int, *, layers: Span = None, tokens: Span = None, heads: Span = None) -> Array:
        """Return the contents of a sequence, or a part of them, as the bytes of a file: uint8 [n] (MOVE-01, MOVE-05).

        layers, tokens, heads: a range `[start, stop)` each, as a list of two integers, or None for all. `kvref.save` writes a
        file without a copy of everything in memory.

        Raises SequenceNotFound, LayerOutOfRange, PositionOutOfRange or HeadOutOfRange, and ConfigError for a part of the heads in
        a format with one scale per token for all heads (q8, q4).
        """
        return serialization.as_array(self.contents(sequence, layers=layers, tokens=tokens, heads=heads), self._backend)

    def load(self, sequence: int, data: Array) -> None:
        """Replace the contents of a sequence by saved ones (MOVE-01).

        data: uint8 [n], as `save` returned it, the whole or a part. The sequence keeps its present contents until all parts are
        loaded (MOVE-05). Blocks for the new contents are allocated before the old ones are freed.

        Raises SequenceNotFound; ShapeMismatch or DtypeMismatch for `data`; FileDamaged (MOVE-03); ConfigError if the sizes or
        formats differ, or for a part that does not fit the parts loaded before; OutOfBlocks. If it raises, nothing has changed.
        """
        self._table(sequence)
        self.receive(serialization.open_bytes(data, self._backend), sequence)

    def contents(self, sequence: int, *, layers: Span = None, tokens: Span = None, heads: Span = None) -> Contents:
        """Describe what `kvref.save` writes: the tokens in order, independent of their blocks. Raises as `save` does."""
        table = self._table(sequence)
        extent = SavedSequence(int(self._tables.first(table).max()), tuple(self._tables.lengths[table].tolist()))
        part = Part.of(extent, self.config.num_kv_heads, layers, tokens, heads)
        state = {"first": extent.first, "lengths": list(extent.lengths), **part.to_json()}
        return Contents("paged", self._shape_to_match(), state, self._token_spans(table, extent, part))

    def receive(self, file: BinaryIO, sequence: int) -> None:
        """`load` from an open binary file. Used by `kvref.load`."""
        self._table(sequence)
        saved_file = serialization.SavedFile(file, "paged", self._shape_to_match())
        extent, part = read_part(saved_file.saved, self.config.num_layers, self.config.num_kv_heads)
        begun = self._pending_loads.get(int(sequence))
        if begun is None or extent.size(part) == extent.size(self._full_part(extent)):
            load = PendingLoad(self._allocate_table(extent), extent)
        else:
            begun.check(extent, part)
            load = begun
        try:
            saved_file.read_into(self._token_spans(load.room, extent, part), self._backend)
        except BaseException:
            if load is not begun:
                self.pool.free_many(self._tables.close(load.room))
            raise
        load.add(part)
        if load.is_complete(self._full_part(extent)):
            self._replace_table(sequence, load)
        else:
            self._pending_loads[int(sequence)] = load

    def _layer_positions(self, sequence: int, layer: int) -> tuple[int, int, NDArray[np.int64]]:
        """Check sequence and layer: the table, the layer, and all positions of the layer that are not released."""
        table, layer = self._table(sequence), self._layer(layer)
        return table, layer, np.arange(self._tables.first(table)[layer], self._tables.lengths[table, layer])

    def _shape_to_match(self) -> dict[str, int | float | str]:
        """The sizes and formats that a loading cache must have too (MOVE-02)."""
        return shape_of(self.config, "num_blocks", "block_size", formats=self.config.formats)

    def _full_part(self, extent: SavedSequence) -> Part:
        """The part that consists of the whole sequence."""
        return Part.of(extent, self.config.num_kv_heads)

    def _token_spans(self, table: int, extent: SavedSequence, part: Part) -> list[TokenSpan]:
        """The keys and values of each layer of a part, in the blocks of a table. Raises ConfigError as `save` does."""
        heads, found = None if len(part.heads) == self.config.num_kv_heads else part.heads, list[TokenSpan]()
        if heads is not None and self._store.format.granularity == "token":
            raise ConfigError(f"heads: expected all (a {self._store.format.name} token has one scale for all heads), got {heads}")
        for layer in part.layers:
            slots = self._tables.slots(table, layer, np.array(extent.tokens(part, layer), np.int64))
            found += key_and_value_spans(f"layers.{layer}", self._store, slots, heads)
        return found

    def _allocate_table(self, extent: SavedSequence) -> int:
        """A table with blocks for a sequence to load. Raises OutOfBlocks, or ConfigError if it begins in a block (MOVE-02)."""
        released, inside = divmod(extent.first, self.config.block_size)
        if inside:
            raise ConfigError(
                f"load: expected a first position that is a multiple of block_size {self.config.block_size}, got {extent.first}"
            )
        table = self._tables.open()
        try:
            self._tables.append(table, np.full((released, self.config.num_layers), NO_BLOCK, np.int32))
            self._tables.released[table] = released
            self._make_writable(self._missing_entries(table, max(extent.lengths)), table, 0, np.arange(0))
        except BaseException:
            self._tables.close(table)
            raise
        self._tables.lengths[table] = extent.lengths
        return table

    def _replace_table(self, sequence: int, load: PendingLoad) -> None:
        """Give a sequence the table of a complete load, and free its old blocks and those of another pending load."""
        if self._pending_loads.get(int(sequence)) is load:
            del self._pending_loads[int(sequence)]
        self._discard_pending_load(sequence)
        old, self._table_of[int(sequence)] = self._table(sequence), load.room
        self.pool.free_many(self._tables.close(old))

    def _discard_pending_load(self, sequence: int) -> None:
        """Free the blocks of a load of which only some parts are loaded, if there is one."""
        if load := self._pending_loads.pop(int(sequence), None):
            self.pool.free_many(self._tables.close(load.room))

    def _rotate_keys(self, rotary: Rotary, by: int, slots: NDArray[np.int64]) -> Quantized:
        """The keys in these slots, rotated by `by` positions and quantized. Raises NonFinite."""
        keys = self._store.keys
        rotated = keys.quantized(rotary.turned(keys.read(slots), by, self._backend))
        overflows = self._backend.xp.isinf(keys.dequantized(rotated))  # quantizing raises in formats with scales only
        if self._backend.xp.any(overflows):
            raise NonFinite(f"keys: expected finite numbers in {self.config.dtype} after the rotation, got infinity")
        return rotated

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self._store.copy(sources, targets, self.config.block_size)


def _earlier_occurrences(sequences: Sequence[int]) -> NDArray[np.int64]:
    """How often each sequence occurs before its place in the batch: [B]; [1] with a 0 if all are different."""
    named = list(sequences)
    if len(set(named)) == len(named):
        return np.zeros(1, np.int64)
    counts, before = Counter[int](), []
    for sequence in named:
        before.append(counts[sequence])
        counts[sequence] += 1
    return np.array(before, np.int64)
