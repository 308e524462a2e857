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
        for block in self._tables.close(self._table(sequence)):
            self.pool.free(block)
        del self._table_of[sequence]

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        """Hold ceil(num_tokens / block_size) blocks in every layer, or more. Raises OutOfBlocks and takes none (PAGED-05)."""
        table = self._table(sequence)
        self._ensure(table, in_range(num_tokens, None, PositionOutOfRange, "num_tokens"))

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
        self._ensure(table, end)
        slots = self._tables.slots(table, layer, np.arange(start, end))
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
        self._ensure_each(tables, positions + 1)
        self._store.write(self._tables.slots(tables, layer, positions), keys, values)
        self._tables.lengths[tables, layer] = positions + 1  # of a table named twice the last counts

    def append_step(self, sequences: Sequence[int], keys: Array, values: Array) -> None:
        """`append` in every layer, keys and values [num_layers, B, num_kv_heads, head_dim], in one scatter: to all or none."""
        tables, config = self._tables_of(sequences), self.config
        shape = (config.num_layers, len(tables), config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        positions = self._tables.lengths[tables] + _times_before(sequences)[:, None]  # [B, num_layers]
        self._ensure_each(tables, positions.max(axis=1) + 1)
        slots = self._tables.slots(tables[:, None], np.arange(config.num_layers), positions)
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

    def _ensure(self, table: int, num_tokens: int) -> None:
        """Room for `num_tokens` in every layer of one sequence, or OutOfBlocks and no block taken."""
        missing = self._tables.entries_for(num_tokens) - int(self._tables.counts[table])
        if missing > 0:
            self._extend({table: missing})

    def _ensure_each(self, tables: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
        """`_ensure` of several, to all or none."""
        missing = self._tables.entries_for(num_tokens) - self._tables.counts[tables]
        short = (missing > 0).nonzero()[0]
        if short.size == 0:
            return
        more: dict[int, int] = {}
        for table, count in zip(tables[short].tolist(), missing[short].tolist(), strict=True):
            more[table] = max(count, more.get(table, 0))  # a sequence may be named twice
        self._extend(more)

    def _extend(self, more: Mapping[int, int]) -> None:
        """Blocks of every layer for so many more entries of each table, or OutOfBlocks and none."""
        needed = self.config.num_layers * sum(more.values())
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"blocks: expected {needed} free ones, got {self.pool.num_free}")
        self._tables.extend(more, self.pool.allocate_many(needed))


def _times_before(sequences: Sequence[int]) -> NDArray[np.int64]:
    """How often each sequence was named before in the same batch: nearly always never, [1] or [B]."""
    named = list(sequences)
    if len(set(named)) == len(named):
        return np.zeros(1, np.int64)
    return np.array([named[:i].count(sequence) for i, sequence in enumerate(named)], np.int64)
