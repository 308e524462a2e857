"""The paged cache: sequences of tokens in blocks from one pool, as in PagedAttention.

Keys and values each lie in one store of num_blocks * block_size slots, shared by all layers and sequences. A sequence's table
says which blocks hold which of its tokens; token p of a layer lies in entry p // block_size at offset p % block_size. A token is
quantized once, and its codes, scale and zero lie in its slot together (PAGED-18).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvref import transfer
from kvref.array import Array
from kvref.attention import attention_as_read
from kvref.backend import Backend, reference
from kvref.blocks import NO_BLOCK
from kvref.contents import Contents, Saved, Stretch, both, shape_of
from kvref.errors import ConfigError, PositionOutOfRange, in_range, whole_fields
from kvref.formats import Format, Quantized, of_keys_and_values
from kvref.inputs import accept_pair
from kvref.parts import Arriving, Part, Span, Whole, read_part
from kvref.rotary import Rotary
from kvref.sequences import Sequences
from kvref.slots import TokenStore


@dataclass(frozen=True)
class PagedConfig:
    """num_blocks counts blocks of one layer: a sequence of n tokens takes num_layers * ceil(n / block_size) of them.

    In vLLM a block id stands for a block in every layer (of a group, where layers differ), so that num_gpu_blocks ids there are
    num_layers * num_gpu_blocks blocks here. One id, the null block, vLLM keeps to itself.

    dtype: any format, whose groups go into head_dim where it has some; engines call it the cache's type, or kv_cache_dtype.
    key_scale, value_scale: what all keys, and all values, are divided by in formats whose scale is given (FMT-STATIC), 1.0 where
    nothing is said; in others there must be none.
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
            format.code_width(self.head_dim)  # which says whether its groups go into it

    @property
    def formats(self) -> tuple[Format, Format]:
        """Of keys, and of values."""
        return of_keys_and_values(self.dtype, self.key_scale, self.value_scale)


class PagedCache(Sequences):
    def __init__(self, config: PagedConfig, backend: Backend = reference) -> None:
        super().__init__(config.num_blocks, config.num_layers, config.block_size, backend)
        self.config = config
        slots = config.num_blocks * config.block_size
        of_keys, of_values = config.formats
        self._store = TokenStore(backend, of_keys, slots, config.num_kv_heads, config.head_dim, of_values)
        self._arriving: dict[int, Arriving] = {}  # by sequence, what has come of one that is to take its place

    def drop(self, sequence: int) -> None:
        super().drop(sequence)
        self._forget_parts(sequence)

    def remove(self, sequence: int, start: int, stop: int, theta: float | None = None, layout: str = "halves") -> None:
        """Forget tokens start .. stop of every layer; those behind them move up (EDIT-10).

        theta: where keys carry rotary positions of this base, those that move are turned back by stop - start positions, and
        quantized again; all else moves bit for bit. layout: which numbers of a head turn together, "halves" or "pairs" (see
        `kvref.rotary`).

        Raises PositionOutOfRange unless 0 <= start <= stop <= the length of every layer, ConfigError for a theta or a layout
        that is none, NonFinite for turned keys that the format cannot hold, and OutOfBlocks where what moves would have to be
        copied and there is no room; then nothing has changed.
        """
        table = self._table(sequence)
        stop = in_range(stop, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "stop")
        start = self._held(table, start, stop + 1, "start")
        rotary = None if theta is None else Rotary(self.config.head_dim, theta, layout)
        if start == stop:
            return
        lengths = self._tables.lengths[table] - (stop - start)
        layers, positions = np.concatenate(
            [np.stack([np.full(length - start, layer), np.arange(start, length)]) for layer, length in enumerate(lengths)], axis=1
        )
        behind = positions + stop - start
        keys = None if rotary is None else self._turned(rotary, start - stop, self._tables.slots(table, layers, behind))
        self._prepare({}, table, layers, positions)
        old, new = (self._tables.slots(table, layers, each) for each in (behind, positions))
        self._store.copy(old, new)
        if keys is not None:
            self._store.keys.put(new, keys)
        self._cut(table, lengths)

    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] at positions start .. start + n, taking blocks as needed.

        `start` lies at or before the layer's length: there are no holes (PAGED-10), and what was there is overwritten.
        """
        table, layer = self._table(sequence), self._layer(layer)
        length = int(self._tables.lengths[table, layer])
        start = self._held(table, start, length + 1, "start")
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        end = start + keys.shape[0]
        positions = np.arange(start, end)
        new = self._store.quantized(keys, values)  # may raise, so that it comes before a block is taken
        self._prepare(self._missing(table, end), table, layer, positions)
        self._store.put(self._tables.slots(table, layer, positions), new)
        self._tables.lengths[table, layer] = max(length, end)

    def append(self, sequences: Sequence[int], layer: int, keys: Array, values: Array) -> None:
        """Append one token to each of B sequences in one layer, keys and values [B, num_kv_heads, head_dim]: to all or none.

        The same as writing each at its sequence's length, one by one (PAGED-16). Raises as `write` does.
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        shape = (len(tables), self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        new, positions = self._store.quantized(keys, values), self._tables.lengths[tables, layer] + _times_before(sequences)
        self._prepare(self._missing_each(tables, positions + 1), tables, layer, positions)
        self._store.put(self._tables.slots(tables, layer, positions), new)
        self._tables.lengths[tables, layer] = positions + 1  # of a table named twice the last counts

    def append_step(self, sequences: Sequence[int], keys: Array, values: Array) -> None:
        """`append` in every layer, keys and values [num_layers, B, num_kv_heads, head_dim], in one scatter: to all or none."""
        tables, config = self._tables_of(sequences), self.config
        shape = (config.num_layers, len(tables), config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        tokens = (config.num_layers * len(tables), config.num_kv_heads, config.head_dim)
        new = self._store.quantized(*(self._backend.xp.reshape(each, tokens) for each in (keys, values)))
        positions = self._tables.lengths[tables] + _times_before(sequences)[:, None]  # [B, num_layers]
        step = tables[:, None], np.arange(config.num_layers), positions
        self._prepare(self._missing_each(tables, positions.max(axis=1) + 1), *step)
        self._store.put(self._tables.slots(*step).T.reshape(-1), new)
        self._tables.lengths[tables] = positions + 1

    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values at `positions`, float32 [n, num_kv_heads, head_dim]. Raises PositionOutOfRange past the length."""
        table, layer = self._table(sequence), self._layer(layer)
        length, what = int(self._tables.lengths[table, layer]), f"position in sequence {sequence}, layer {layer}"
        wanted = np.array([self._held(table, position, length, what) for position in positions], np.int64)
        return self._store.read(self._tables.slots(table, layer, wanted))

    def gather(self, sequence: int, layer: int) -> tuple[Array, Array]:
        """Every token of the layer that is held, in order (PAGED-12)."""
        table, layer, positions = self._everywhere(sequence, layer)
        return self._store.read(self._tables.slots(table, layer, positions))

    def gather_batch(self, sequences: Sequence[int], layer: int) -> tuple[Array, Array, Array]:
        """Every token that B sequences hold, one after the other.

        Keys, values float32 [total, num_kv_heads, head_dim] and offsets [B + 1].
        Tokens offsets[i] .. offsets[i + 1] (int32) are those of sequence i: how kernels take a batch of any lengths (PAGED-17).
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        first = self._tables.first(tables)[:, layer]
        counts = self._tables.lengths[tables, layer] - first
        offsets = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
        keys, values = self._store.read(self._tables.slots(np.repeat(tables, counts), layer, positions))
        return keys, values, self._backend.asarray(offsets.astype(np.int32))

    def attend(self, sequence: int, layer: int, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over the sequence's tokens in the layer (ATTN-10)."""
        table, layer, positions = self._everywhere(sequence, layer)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(self._tables.slots(table, layer, positions[start:stop]))

        row = self.config.num_kv_heads, self.config.head_dim
        return attention_as_read(query, read, len(positions), row, scale=scale, causal=causal, backend=self._backend)

    def save(self, sequence: int, *, layers: Span = None, tokens: Span = None, heads: Span = None) -> Array:
        """What a sequence holds, or a part of it, as a file's bytes, uint8 [n] (MOVE-01); `kvref.save` writes the file itself.

        layers, tokens, heads: [start, stop], or all. Raises SequenceNotFound, LayerOutOfRange, PositionOutOfRange or
        HeadOutOfRange, and ConfigError for some heads of tokens that have one scale for all.
        """
        return transfer.as_array(self.contents(sequence, layers=layers, tokens=tokens, heads=heads), self._backend)

    def load(self, sequence: int, data: Array) -> None:
        """Let a sequence hold what was saved, in place of what it holds, which goes once all parts have come (MOVE-05).

        Raises SequenceNotFound, FileDamaged, ConfigError, or OutOfBlocks where there is no room beside what it holds.
        """
        self._table(sequence)
        self.receive(transfer.opened(data, self._backend), sequence)

    def contents(self, sequence: int, *, layers: Span = None, tokens: Span = None, heads: Span = None) -> Contents:
        """What is saved of a sequence: nothing of the blocks that it lies in."""
        table = self._table(sequence)
        whole = Whole(int(self._tables.first(table).max()), tuple(self._tables.lengths[table].tolist()))
        part = Part.of(whole, self.config.num_kv_heads, layers, tokens, heads)
        state = {"first": whole.first, "lengths": list(whole.lengths), **part.said()}
        return Contents("paged", self._moved_shape(), state, self._stretches(table, whole, part))

    def receive(self, file: BinaryIO, sequence: int) -> None:
        """`load` of a file that is open."""
        self._table(sequence)
        began = self._arriving.get(int(sequence))
        came: list[tuple[Arriving, Part]] = []

        def place(saved: Saved) -> list[Stretch]:
            whole, part = read_part(saved, self.config.num_layers, self.config.num_kv_heads)
            if began is None or Arriving(-1, whole, [part]).is_whole(self._everything(whole)):
                came.append((Arriving(self._room_for(whole), whole), part))
            else:
                began.check(whole, part)
                came.append((began, part))
            return self._stretches(came[0][0].table, whole, part)

        try:
            transfer.read(file, "paged", self._moved_shape(), place, self._backend)
        except BaseException:
            if came and came[0][0] is not began:
                self.pool.free_many(self._tables.close(came[0][0].table))
            raise
        arriving, part = came[0]
        arriving.parts.append(part)
        if not arriving.is_whole(self._everything(arriving.whole)):
            self._arriving[int(sequence)] = arriving
            return
        if arriving is began:
            del self._arriving[int(sequence)]
        self._forget_parts(sequence)
        before, self._table_of[int(sequence)] = self._table(sequence), arriving.table
        self.pool.free_many(self._tables.close(before))

    def _everywhere(self, sequence: int, layer: int) -> tuple[int, int, NDArray[np.int64]]:
        """A sequence's table, the layer, and the positions of the tokens held there."""
        table, layer = self._table(sequence), self._layer(layer)
        return table, layer, np.arange(self._tables.first(table)[layer], self._tables.lengths[table, layer])

    def _moved_shape(self) -> dict[str, int | float | str]:
        return shape_of(self.config, "num_blocks", "block_size", formats=self.config.formats)

    def _everything(self, whole: Whole) -> Part:
        return Part.of(whole, self.config.num_kv_heads)

    def _stretches(self, table: int, whole: Whole, part: Part) -> list[Stretch]:
        heads, found = None if len(part.heads) == self.config.num_kv_heads else part.heads, list[Stretch]()
        if heads is not None and self._store.format.granularity == "token":
            raise ConfigError(f"heads: expected all (a {self._store.format.name} token has one scale for all heads), got {heads}")
        for layer in part.layers:
            slots = self._tables.slots(table, layer, np.array(whole.tokens(part, layer), np.int64))
            found += both(f"layers.{layer}", self._store, slots, heads)
        return found

    def _room_for(self, whole: Whole) -> int:
        """A table for one that is to come, with its blocks. Raises OutOfBlocks, and ConfigError where it begins in a block."""
        released, inside = divmod(whole.first, self.config.block_size)
        if inside:
            raise ConfigError(f"load: expected a first position that is a multiple of block_size {self.config.block_size}, got {whole.first}")
        table = self._tables.open()
        try:
            self._tables.append(table, np.full((released, self.config.num_layers), NO_BLOCK, np.int32))
            self._tables.released[table] = released
            self._prepare(self._missing(table, max(whole.lengths)), table, 0, np.arange(0))
        except BaseException:
            self._tables.close(table)
            raise
        self._tables.lengths[table] = whole.lengths
        return table

    def _forget_parts(self, sequence: int) -> None:
        if arriving := self._arriving.pop(int(sequence), None):
            self.pool.free_many(self._tables.close(arriving.table))

    def _turned(self, rotary: Rotary, by: int, slots: NDArray[np.int64]) -> Quantized:
        """What keys are stored as once they are turned. Raises NonFinite."""
        return self._store.keys.quantized(rotary.turned(self._store.keys.read(slots), by, self._backend))

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        self._store.copy(sources, targets, self.config.block_size)


def _times_before(sequences: Sequence[int]) -> NDArray[np.int64]:
    """How often each sequence was named before in the same batch: nearly always never, [1] or [B]."""
    named = list(sequences)
    if len(set(named)) == len(named):
        return np.zeros(1, np.int64)
    return np.array([named[:i].count(sequence) for i, sequence in enumerate(named)], np.int64)
