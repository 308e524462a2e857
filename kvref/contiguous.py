"""The contiguous cache: one growing buffer each for keys and values.

Buffers are [batch_size, num_kv_heads, capacity, head_dim]; tokens lie at [:seq_len]. When they no longer fit, capacity doubles
until they do, never past max_seq_len, and the tokens are copied over. Between growths the buffers are the same memory, so that
a captured graph may write into them and `advance` the length afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.errors import CapacityExceeded, PositionOutOfRange, RowOutOfRange, in_range, whole_fields
from kvref.formats import PLAIN_DTYPES, Quantized, get_format
from kvref.inputs import accept, accept_pair


@dataclass(frozen=True)
class ContiguousConfig:
    """Sizes in tokens, heads and elements. initial_capacity may be 0 and is cut to max_seq_len.

    dtype: how values are stored: float32, float16 or bfloat16.
    """

    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    batch_size: int = 1
    initial_capacity: int = 256
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "max_seq_len", "batch_size")
        whole_fields(self, "initial_capacity", minimum=0)
        get_format(self.dtype, among=PLAIN_DTYPES)


class ContiguousCache:
    def __init__(self, config: ContiguousConfig, backend: Backend = reference) -> None:
        self.config = config
        self.seq_len = 0
        self.capacity = min(config.initial_capacity, config.max_seq_len)  # CONTIG-01
        self._backend = backend
        self._format = get_format(config.dtype)
        self._keys, self._values = self._new_buffer(self.capacity), self._new_buffer(self.capacity)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [batch_size, num_kv_heads, n, head_dim].

        Raises ShapeMismatch, DtypeMismatch, or CapacityExceeded past max_seq_len; growth is undone by not having begun.
        """
        config = self.config
        shape = (config.batch_size, config.num_kv_heads, "n", config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        needed = self.seq_len + keys.shape[2]
        if needed > config.max_seq_len:
            raise CapacityExceeded(f"cache full: {needed} tokens needed, max_seq_len is {config.max_seq_len}")
        new_keys, new_values = self._cast(keys), self._cast(values)
        if needed > self.capacity:
            self._grow(needed)
        self._keys = self._backend.update(self._keys, new_keys, self.seq_len)
        self._values = self._backend.update(self._values, new_values, self.seq_len)
        self.seq_len = needed

    def append_fused(self, key_values: Array) -> None:
        """`append` from one array [2, batch_size, num_kv_heads, n, head_dim], keys first, as a fused projection makes it."""
        config = self.config
        shape = (2, config.batch_size, config.num_kv_heads, "n", config.head_dim)
        key_values = accept("key_values", key_values, shape, self._backend)
        self.append(key_values[0, ...], key_values[1, ...])

    def read(self) -> tuple[Array, Array]:
        """All keys and values, float32 [batch_size, num_kv_heads, seq_len, head_dim].

        Views of the buffers where these are float32, and widened copies where not.
        """
        return self._read(self._keys), self._read(self._values)

    def raw(self) -> tuple[Array, Array]:
        """The buffers themselves, [batch_size, num_kv_heads, capacity, head_dim] in the cache's dtype (CONTIG-07).

        With a library of immutable arrays: the buffers as they are now, which the next `append` replaces (CONTIG-08).
        """
        return self._keys, self._values

    def advance(self, count: int) -> None:
        """Count `count` tokens, written into the raw buffers at seq_len by someone else, as readable (CONTIG-10).

        Raises CapacityExceeded past the buffers' capacity, PositionOutOfRange for a negative count.
        """
        count = in_range(count, None, PositionOutOfRange, "count")
        if self.seq_len + count > self.capacity:
            raise CapacityExceeded(f"advance: {self.seq_len + count} tokens needed, capacity is {self.capacity}")
        self.seq_len += count

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; capacity and memory stay (EDIT-01).

        Raises PositionOutOfRange for more than there are.
        """
        self.seq_len = in_range(length, self.seq_len + 1, PositionOutOfRange, "length")

    def reorder(self, rows: Sequence[int]) -> None:
        """Let sequence i of the batch be what sequence rows[i] was: beams that go on from others (EDIT-07).

        Rows may repeat, and their number is the new batch_size; where it stays, so does the memory. Raises RowOutOfRange, and
        ConfigError for no rows.
        """
        chosen = [in_range(row, self.config.batch_size, RowOutOfRange, "row") for row in rows]
        config = replace(self.config, batch_size=len(chosen))
        keys, values = (self._backend.gather(buffer, chosen) for buffer in (self._keys, self._values))
        if config == self.config:
            keys, values = self._backend.update(self._keys, keys, 0), self._backend.update(self._values, values, 0)
        self.config, self._keys, self._values = config, keys, values

    def reset(self) -> None:
        """Forget every token; capacity and memory stay (CONTIG-11)."""
        self.seq_len = 0

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [batch_size, num_query_heads, num_queries, head_dim] over the cache, sequence by sequence.

        The axes stand as they do in keys and values: heads before tokens.
        """
        config, xp = self.config, self._backend.xp
        query = accept("query", query, (config.batch_size, "num_query_heads", "num_queries", config.head_dim), self._backend)
        query, keys, values = (xp.permute_dims(each, (0, 2, 1, 3)) for each in (query, *self.read()))
        attended = [
            attention(query[b, ...], keys[b, ...], values[b, ...], scale=scale, causal=causal, backend=self._backend)
            for b in range(config.batch_size)
        ]
        return xp.permute_dims(xp.stack(attended), (0, 2, 1, 3))

    def _cast(self, values: Array) -> Array:
        """As the buffers hold them: a plain dtype has codes and nothing else."""
        return self._backend.quantize(values, self._format).codes

    def _read(self, buffer: Array) -> Array:
        return self._backend.dequantize(Quantized(buffer[:, :, : self.seq_len, :]), self.config.head_dim, self._format)

    def _grow(self, needed: int) -> None:
        capacity = max(self.capacity, 1)  # doubling 0 would never get anywhere (CONTIG-04)
        while capacity < needed:
            capacity *= 2
        capacity = min(capacity, self.config.max_seq_len)
        keys, values = self._new_buffer(capacity), self._new_buffer(capacity)
        keys = self._backend.update(keys, self._keys[:, :, : self.seq_len, :], 0)
        values = self._backend.update(values, self._values[:, :, : self.seq_len, :], 0)
        self._keys, self._values, self.capacity = keys, values, capacity

    def _new_buffer(self, capacity: int) -> Array:
        config = self.config
        shape = (config.batch_size, config.num_kv_heads, capacity, config.head_dim)
        return self._backend.zeros(shape, self._format.code_dtype(self._backend.xp))
