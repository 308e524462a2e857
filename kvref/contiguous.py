"""The contiguous cache: one buffer for keys and one for values, which grow.

The buffers are [batch_size, num_kv_heads, capacity, head_dim], and tokens are at `[:, :, :seq_len]`. If an append does not fit,
the capacity is doubled until it does, up to max_seq_len, and the tokens are copied to new buffers. Otherwise the buffers stay the
same memory, so that a captured graph (CUDA graph) can write to them and the caller can `advance` the length afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.errors import CapacityExceeded, PositionOutOfRange, RowOutOfRange, in_range, whole_fields
from kvref.formats import PLAIN_DTYPES, Quantized, get_format
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class ContiguousConfig:
    """Sizes and dtype of a ContiguousCache. Raises ConfigError (LAW-12).

    - `max_seq_len`: tokens per sequence, at most.
    - `initial_capacity`: tokens for which memory is allocated at first, 0 or more, limited to max_seq_len (CONTIG-01).
    - `dtype`: float32, float16 or bfloat16.
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
        get_format(self.dtype, among=PLAIN_DTYPES, argument="dtype")


class ContiguousCache:
    """A cache of one layer for a batch of sequences of equal length (chapter CONTIG).

    `seq_len` is the number of tokens per sequence, `capacity` the number for which memory is allocated. Arrays have the heads
    before the tokens: [batch_size, num_kv_heads, n, head_dim].
    """

    def __init__(self, config: ContiguousConfig, backend: Backend = reference) -> None:
        """Allocate buffers of the initial capacity on the device of `backend`."""
        self.config = config
        self.seq_len = 0
        self.capacity = min(config.initial_capacity, config.max_seq_len)  # CONTIG-01
        self._backend = backend
        self._format = get_format(config.dtype)
        self._keys, self._values = self._new_buffer(self.capacity), self._new_buffer(self.capacity)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens to every sequence. keys, values: [batch_size, num_kv_heads, n, head_dim].

        Raises ShapeMismatch, DtypeMismatch, or CapacityExceeded if there would be more than max_seq_len tokens. Everything is
        checked before the buffers grow.
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
        """`append` from one array, as a fused projection returns it. Raises as `append` does.

        key_values: [2, batch_size, num_kv_heads, n, head_dim], keys first.
        """
        config = self.config
        shape = (2, config.batch_size, config.num_kv_heads, "n", config.head_dim)
        key_values = accept("key_values", key_values, shape, self._backend)
        self.append(key_values[0, ...], key_values[1, ...])

    def read(self) -> tuple[Array, Array]:
        """Return all keys and values: float32 [batch_size, num_kv_heads, seq_len, head_dim] each.

        With dtype float32 they are views of the buffers (if the library has views), otherwise copies. An empty cache returns
        arrays of 0 tokens (CONTIG-03).
        """
        return self._read(self._keys), self._read(self._values)

    def raw(self) -> tuple[Array, Array]:
        """Return the buffers of keys and values: [batch_size, num_kv_heads, capacity, head_dim] of the cache's dtype (CONTIG-07).

        In a library without float16 or bfloat16 they are uint16 arrays with the same bits. In a library with immutable arrays,
        the next `append` replaces them (CONTIG-08).
        """
        return self._keys, self._values

    def advance(self, count: int) -> None:
        """Increase `seq_len` by `count` tokens that the caller has written to the raw buffers from seq_len on (CONTIG-10).

        Raises CapacityExceeded if they exceed the present capacity, PositionOutOfRange if `count` is negative.
        """
        count = in_range(count, None, PositionOutOfRange, "count")
        if self.seq_len + count > self.capacity:
            raise CapacityExceeded(f"advance: {self.seq_len + count} tokens needed, capacity is {self.capacity}")
        self.seq_len += count

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length`. Capacity and memory stay the same (EDIT-01).

        Raises PositionOutOfRange unless `length` is in `[0, seq_len + 1)`.
        """
        self.seq_len = in_range(length, self.seq_len + 1, PositionOutOfRange, "length")

    def reorder(self, rows: Sequence[int]) -> None:
        """Replace row i of the batch by the former row `rows[i]`, for all i at the same time, as beam search needs (EDIT-07).

        rows: indices of rows, which can repeat. Their number is the new batch_size; if it does not change, the buffers stay the
        same memory. Raises RowOutOfRange, or ConfigError if there are no rows.
        """
        chosen = [in_range(row, self.config.batch_size, RowOutOfRange, "row") for row in rows]
        config = replace(self.config, batch_size=len(chosen))
        keys, values = (self._backend.gather(buffer, chosen) for buffer in (self._keys, self._values))
        if config == self.config:
            keys, values = self._backend.update(self._keys, keys, 0), self._backend.update(self._values, values, 0)
        self.config, self._keys, self._values = config, keys, values

    def reset(self) -> None:
        """Remove every token. Capacity and memory stay the same (CONTIG-11)."""
        self.seq_len = 0

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return attention, for each sequence over its own tokens: float32 [batch_size, num_query_heads, num_queries, head_dim].

        query: [batch_size, num_query_heads, num_queries, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are
        those of the last tokens, and each sees the tokens up to its own. Raises ShapeMismatch or DtypeMismatch.
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
        """Values in the dtype of the buffers. Formats without scales consist of codes only."""
        return self._backend.quantize(values, self._format).codes

    def _read(self, buffer: Array) -> Array:
        """The first seq_len tokens of a buffer, as float32."""
        return self._backend.dequantize(Quantized(buffer[:, :, : self.seq_len, :]), self.config.head_dim, self._format)

    def _grow(self, needed: int) -> None:
        """Replace the buffers by larger ones with the same tokens (CONTIG-04)."""
        capacity = max(self.capacity, 1)  # doubling 0 would not increase it (CONTIG-04)
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
