"""The paged cache: sequences of tokens in blocks from one pool, as in PagedAttention.

Keys and values each lie in one store of num_blocks * block_size slots, shared by all layers and sequences. A sequence's table
says which blocks hold which of its tokens; token p of a layer lies in entry p // block_size at offset p % block_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.blocks import BlockPool, BlockTable
from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound, in_range, is_integer, whole
from kvref.formats import PLAIN_DTYPES, get_format
from kvref.inputs import accept_pair
from kvref.rows import TokenStore


@dataclass(frozen=True)
class PagedConfig:
    """num_blocks counts blocks of one layer's keys and values, over all sequences and layers."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole("num_blocks", self.num_blocks, minimum=0)
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            whole(name, getattr(self, name))
        get_format(self.dtype, among=PLAIN_DTYPES)


class _Sequence:
    def __init__(self, config: PagedConfig) -> None:
        self.table = BlockTable(config.num_layers, config.block_size)
        self.lengths = [0] * config.num_layers  # tokens written, a layer


class PagedCache:
    def __init__(self, config: PagedConfig, backend: Backend = reference) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._backend = backend
        slots = config.num_blocks * config.block_size
        self._store = TokenStore(backend, get_format(config.dtype), slots, config.num_kv_heads, config.head_dim)
        self._sequences: dict[int, _Sequence] = {}
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
        self._sequences[sequence] = _Sequence(self.config)
        return sequence

    def drop(self, sequence: int) -> None:
        """Forget a sequence and give back every block it held. Raises SequenceNotFound."""
        table = self._find(sequence).table
        for layer in range(self.config.num_layers):
            for block in table.blocks(layer):
                self.pool.free(block)
        del self._sequences[sequence]

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        """Hold ceil(num_tokens / block_size) blocks in every layer, or more. Raises OutOfBlocks and takes none (PAGED-05)."""
        table = self._find(sequence).table
        in_range(num_tokens, None, PositionOutOfRange, "num_tokens")
        held = table.capacity(0) // self.config.block_size  # the same in every layer
        missing = max(0, -(-num_tokens // self.config.block_size) - held)
        needed = missing * self.config.num_layers
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"ensure_capacity: expected {needed} free blocks, got {self.pool.num_free}")
        for layer in range(self.config.num_layers):
            for _ in range(missing):
                table.append(layer, self.pool.allocate())

    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None:
        """Write keys and values [n, num_kv_heads, head_dim] at positions start .. start + n, taking blocks as needed.

        `start` lies at or before the layer's length: there are no holes (PAGED-10), and what was there is overwritten.
        """
        found = self._find(sequence)
        in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")
        in_range(start, found.lengths[layer] + 1, PositionOutOfRange, "start")
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        count = keys.shape[0]
        self.ensure_capacity(sequence, start + count)
        self._store.write([found.table.slot(layer, start + i) for i in range(count)], keys, values)
        found.lengths[layer] = max(found.lengths[layer], start + count)

    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values at `positions`, float32 [n, num_kv_heads, head_dim]. Raises PositionOutOfRange past the length."""
        found, length = self._find(sequence), self.length(sequence, layer)
        for position in positions:
            in_range(position, length, PositionOutOfRange, f"position in sequence {sequence}, layer {layer}")
        return self._store.read([found.table.slot(layer, position) for position in positions])

    def gather(self, sequence: int, layer: int) -> tuple[Array, Array]:
        """Every token of the layer, in order (PAGED-12)."""
        return self.read(sequence, layer, range(self.length(sequence, layer)))

    def length(self, sequence: int, layer: int) -> int:
        """Tokens written to the layer: not the room its blocks have (PAGED-09)."""
        found = self._find(sequence)
        in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")
        return found.lengths[layer]

    def block_table(self, sequence: int, layer: int) -> list[int]:
        """The blocks that hold the layer's tokens, in order."""
        return self._find(sequence).table.blocks(layer)

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        """block * block_size + offset for positions start .. start + count, all within the blocks held (PAGED-06)."""
        table = self._find(sequence).table
        in_range(count, None, PositionOutOfRange, "count")
        capacity = table.capacity(layer)
        in_range(start, None, PositionOutOfRange, "start")
        in_range(start + count, capacity + 1, PositionOutOfRange, "start + count")
        return [table.slot(layer, start + i) for i in range(count)]

    def attend(self, sequence: int, layer: int, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over the sequence's tokens in the layer (ATTN-10)."""
        keys, values = self.gather(sequence, layer)
        return attention(query, keys, values, scale=scale, causal=causal, backend=self._backend)

    def _find(self, sequence: int) -> _Sequence:
        if not is_integer(sequence) or sequence not in self._sequences:
            raise SequenceNotFound(f"sequence: expected one that was created and not dropped, got {sequence!r}")
        return self._sequences[sequence]
