"""The paged cache: sequences of tokens in blocks from one pool, as in PagedAttention.

Keys and values each lie in one store of num_blocks * block_size slots, shared by all layers and sequences. A sequence's table
says which blocks hold which of its tokens; token p of a layer lies in entry p // block_size at offset p % block_size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.blocks import BlockPool, BlockTables
from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound, in_range, integer, whole_fields
from kvref.formats import PLAIN_DTYPES, get_format
from kvref.inputs import accept_pair
from kvref.rotary import Rotary
from kvref.slots import TokenStore


@dataclass(frozen=True)
class PagedConfig:
    """num_blocks counts blocks of one layer: a sequence of n tokens takes num_layers * ceil(n / block_size) of them.

    In vLLM a block id stands for a block in every layer (of a group, where layers differ), so that num_gpu_blocks ids there are
    num_layers * num_gpu_blocks blocks here. One id, the null block, vLLM keeps to itself.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", minimum=0)
        whole_fields(self, "num_layers", "num_kv_heads", "head_dim", "block_size")
        get_format(self.dtype, among=PLAIN_DTYPES)


class PagedCache:
    def __init__(self, config: PagedConfig, backend: Backend = reference) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._backend = backend
        slots = config.num_blocks * config.block_size
        self._store = TokenStore(backend, get_format(config.dtype), slots, config.num_kv_heads, config.head_dim)
        self._tables = BlockTables(config.num_layers, config.block_size)
        self._table_of: dict[int, int] = {}  # by sequence, the number of its block table
        self._next_sequence = 0

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

        Raises PositionOutOfRange for more tokens than some layer has (EDIT-02).
        """
        table = self._table(sequence)
        length = in_range(length, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "length")
        self._cut(table, length)

    def remove(self, sequence: int, start: int, stop: int, theta: float | None = None, layout: str = "halves") -> None:
        """Forget tokens start .. stop of every layer; those behind them move up (EDIT-10).

        theta: where keys carry rotary positions of this base, those that move are turned back by stop - start positions.
        layout: which numbers of a head turn together, "halves" or "pairs" (see `kvref.rotary`).

        Raises PositionOutOfRange unless 0 <= start <= stop <= the length of every layer, ConfigError for a theta or a layout
        that is none, and OutOfBlocks where what moves would have to be copied and there is no room; then nothing has changed.
        """
        table = self._table(sequence)
        stop = in_range(stop, int(self._tables.lengths[table].min()) + 1, PositionOutOfRange, "stop")
        start = in_range(start, stop + 1, PositionOutOfRange, "start")
        rotary = None if theta is None else Rotary(self.config.head_dim, theta, layout)
        if start == stop:
            return
        lengths = self._tables.lengths[table] - (stop - start)
        layers, positions = np.concatenate(
            [np.stack([np.full(length - start, layer), np.arange(start, length)]) for layer, length in enumerate(lengths)], axis=1
        )
        self._prepare({}, table, layers, positions)
        new = self._tables.slots(table, layers, positions)
        old = self._tables.slots(table, layers, positions + stop - start)
        if rotary is None:
            self._store.copy(old, new)
        else:
            keys, values = self._store.read(old)
            self._store.write(new, rotary.turned(keys, start - stop, self._backend), values)
        self._cut(table, lengths)

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        """Hold ceil(num_tokens / block_size) blocks in every layer, or more. Raises OutOfBlocks and takes none (PAGED-05)."""
        table = self._table(sequence)
        missing = self._missing(table, in_range(num_tokens, None, PositionOutOfRange, "num_tokens"))
        self._prepare(missing, table, 0, np.arange(0))

    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] at positions start .. start + n, taking blocks as needed.

        `start` lies at or before the layer's length: there are no holes (PAGED-10), and what was there is overwritten.
        """
        table, layer = self._table(sequence), self._layer(layer)
        length = int(self._tables.lengths[table, layer])
        start = in_range(start, length + 1, PositionOutOfRange, "start")
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        end = start + keys.shape[0]
        positions = np.arange(start, end)
        self._prepare(self._missing(table, end), table, layer, positions)
        slots = self._tables.slots(table, layer, positions)
        self._store.write(slots, keys, values)
        self._tables.lengths[table, layer] = max(length, end)

    def append(self, sequences: Sequence[int], layer: int, keys: Array, values: Array) -> None:
        """Append one token to each of B sequences in one layer, keys and values [B, num_kv_heads, head_dim]: to all or none.

        The same as writing each at its sequence's length, one by one (PAGED-16). Raises as `write` does.
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        shape = (len(tables), self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        positions = self._tables.lengths[tables, layer] + _times_before(sequences)
        self._prepare(self._missing_each(tables, positions + 1), tables, layer, positions)
        self._store.write(self._tables.slots(tables, layer, positions), keys, values)
        self._tables.lengths[tables, layer] = positions + 1  # of a table named twice the last counts

    def append_step(self, sequences: Sequence[int], keys: Array, values: Array) -> None:
        """`append` in every layer, keys and values [num_layers, B, num_kv_heads, head_dim], in one scatter: to all or none."""
        tables, config = self._tables_of(sequences), self.config
        shape = (config.num_layers, len(tables), config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        positions = self._tables.lengths[tables] + _times_before(sequences)[:, None]  # [B, num_layers]
        step = tables[:, None], np.arange(config.num_layers), positions
        self._prepare(self._missing_each(tables, positions.max(axis=1) + 1), *step)
        slots = self._tables.slots(*step)
        tokens = (slots.size, config.num_kv_heads, config.head_dim)
        keys, values = (self._backend.xp.reshape(each, tokens) for each in (keys, values))
        self._store.write(slots.T.reshape(-1), keys, values)
        self._tables.lengths[tables] = positions + 1

    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values at `positions`, float32 [n, num_kv_heads, head_dim]. Raises PositionOutOfRange past the length."""
        table, layer = self._table(sequence), self._layer(layer)
        length, what = int(self._tables.lengths[table, layer]), f"position in sequence {sequence}, layer {layer}"
        wanted = np.array([in_range(position, length, PositionOutOfRange, what) for position in positions], np.int64)
        return self._store.read(self._tables.slots(table, layer, wanted))

    def gather(self, sequence: int, layer: int) -> tuple[Array, Array]:
        """Every token of the layer, in order (PAGED-12)."""
        table, layer = self._table(sequence), self._layer(layer)
        return self._store.read(self._tables.slots(table, layer, np.arange(self._tables.lengths[table, layer])))

    def gather_batch(self, sequences: Sequence[int], layer: int) -> tuple[Array, Array, Array]:
        """Every token of B sequences, one after the other: keys, values float32 [total, num_kv_heads, head_dim], offsets [B + 1].

        Tokens offsets[i] .. offsets[i + 1] (int32) are those of sequence i: how kernels take a batch of any lengths (PAGED-17).
        """
        tables, layer = self._tables_of(sequences), self._layer(layer)
        lengths = self._tables.lengths[tables, layer]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        keys, values = self._store.read(self._tables.slots(np.repeat(tables, lengths), layer, positions))
        return keys, values, self._backend.asarray(offsets.astype(np.int32))

    def length(self, sequence: int, layer: int) -> int:
        """Tokens written to the layer: not the room its blocks have (PAGED-09)."""
        return int(self._tables.lengths[self._table(sequence), self._layer(layer)])

    def lengths(self, sequences: Sequence[int], layer: int) -> Array:
        """`length` of B sequences, int32 [B] (PAGED-17)."""
        tables, layer = self._tables_of(sequences), self._layer(layer)
        return self._backend.asarray(self._tables.lengths[tables, layer].astype(np.int32))

    def block_table(self, sequence: int, layer: int) -> list[int]:
        """The blocks that hold the layer's tokens, in order."""
        return self._tables.blocks(self._table(sequence), self._layer(layer))

    def block_tables(self, sequences: Sequence[int], layer: int) -> Array:
        """`block_table` of B sequences, int32 [B, most blocks of any], -1 past the end of a table (PAGED-17)."""
        tables, layer = self._tables_of(sequences), self._layer(layer)
        return self._backend.asarray(self._tables.padded(tables, layer))

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        """block * block_size + offset for positions start .. start + count, all within the blocks held (PAGED-06)."""
        table, layer = self._table(sequence), self._layer(layer)
        start = in_range(start, None, PositionOutOfRange, "start")
        end = start + in_range(count, None, PositionOutOfRange, "count")
        in_range(end, self._tables.capacity(table) + 1, PositionOutOfRange, "start + count")
        slots: list[int] = self._tables.slots(table, layer, np.arange(start, end)).tolist()
        return slots

    def attend(self, sequence: int, layer: int, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over the sequence's tokens in the layer (ATTN-10)."""
        keys, values = self.gather(sequence, layer)
        return attention(query, keys, values, scale=scale, causal=causal, backend=self._backend)

    def _table(self, sequence: int) -> int:
        """The number of a sequence's block table."""
        number = integer(sequence)
        if number is None or number not in self._table_of:
            raise SequenceNotFound(f"sequence: expected one that was created and not dropped, got {sequence!r}")
        return self._table_of[number]

    def _tables_of(self, sequences: Sequence[int]) -> NDArray[np.int64]:
        if set(map(type, sequences)) <= {int} and self._table_of.keys() >= set(sequences):
            return np.array([self._table_of[sequence] for sequence in sequences], np.int64)
        return np.array([self._table(sequence) for sequence in sequences], np.int64)  # NumPy's integers, or it raises

    def _layer(self, layer: int) -> int:
        return in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")

    def _missing(self, table: int, num_tokens: int) -> dict[int, int]:
        """The entries that a table needs for so many tokens, as `_prepare` takes them."""
        return {table: max(0, self._tables.entries_for(num_tokens) - int(self._tables.counts[table]))}

    def _missing_each(self, tables: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> dict[int, int]:
        """`_missing` of several."""
        missing = self._tables.entries_for(num_tokens) - self._tables.counts[tables]
        short = (missing > 0).nonzero()[0]
        more: dict[int, int] = {}
        for table, count in zip(tables[short].tolist(), missing[short].tolist(), strict=True):
            more[table] = max(count, more.get(table, 0))  # a sequence may be named twice
        return more

    def _prepare(self, more: Mapping[int, int], tables: Array, layers: Array, positions: Array) -> None:
        """Room to write: so many more entries of each table, and blocks that no one else holds at the positions to be written.

        tables, layers and positions broadcast against each other. Raises OutOfBlocks, and then nothing has changed (SHARE-07).
        """
        places = self._shared(tables, layers, positions // self.config.block_size)
        needed = self.config.num_layers * sum(more.values())
        if needed + len(places) > self.pool.num_free:
            raise OutOfBlocks(f"blocks: expected {needed + len(places)} free ones, got {self.pool.num_free}")
        if needed:
            self._tables.extend(more, self.pool.allocate_many(needed))
        if places:
            targets = self.pool.allocate_many(len(places))
            sources = [self._tables.replace(*place, block) for place, block in zip(places, targets.tolist(), strict=True)]
            self._store.copy(sources, targets, self.config.block_size)
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


def _times_before(sequences: Sequence[int]) -> NDArray[np.int64]:
    """How often each sequence was named before in the same batch: nearly always never, [1] or [B]."""
    named = list(sequences)
    if len(set(named)) == len(named):
        return np.zeros(1, np.int64)
    return np.array([named[:i].count(sequence) for i, sequence in enumerate(named)], np.int64)
