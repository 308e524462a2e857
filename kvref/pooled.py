"""The pooled cache: tokens in blocks whose memory is from a buffer pool, which several caches can share.

A block consists of two buffers, one for the keys and one for the values of up to tokens_per_block tokens. `append` fills the last
block, and then allocates new ones. If there are more than max_tokens tokens, whole blocks are evicted, the oldest first, and
their buffers return to the pool.
"""

from dataclasses import dataclass
from math import prod
from threading import RLock

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.buffers import VALUE_BYTES, BufferPool, BufferStats
from kvref.errors import ConfigError, whole, whole_fields
from kvref.validation import accept_pair


@dataclass(frozen=True)
class PooledConfig:
    """Sizes of a PooledCache. Raises ConfigError (LAW-12).

    `tokens_per_block` is at most `max_tokens`, so that the cache can keep its newest block.
    """

    num_kv_heads: int = 8
    head_dim: int = 128
    tokens_per_block: int = 16
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "tokens_per_block", "max_tokens")
        if self.tokens_per_block > self.max_tokens:
            raise ConfigError(f"tokens_per_block: expected at most max_tokens {self.max_tokens}, got {self.tokens_per_block}")


class PooledBlock:
    """Up to `max_tokens` tokens of keys and values in two buffers.

    It accepts no more tokens than that, even if the size class of its buffers has room for more (POOL-01).
    """

    def __init__(self, pool: BufferPool, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        """Acquire two buffers from the pool. Raises ConfigError or BufferTooLarge, and then acquires none."""
        self.max_tokens = whole("max_tokens", max_tokens)
        self._token_shape = whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        num_bytes = self.max_tokens * self._token_shape[0] * self._token_shape[1] * VALUE_BYTES
        self._keys, self._values = pool.acquire_pair(num_bytes)
        self._xp = pool.backend.xp

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the block."""
        return self._keys.length // prod(self._token_shape)

    @property
    def remaining(self) -> int:
        """The number of further tokens for which the block has room."""
        return self.max_tokens - self.num_tokens

    @property
    def is_full(self) -> bool:
        """Whether the block has max_tokens tokens."""
        return self.remaining == 0

    @property
    def bytes(self) -> int:
        """The sizes of the two buffers, which are size classes."""
        return self._keys.size + self._values.size

    def append(self, keys: Array, values: Array) -> int:
        """Append the first tokens of keys and values [n, num_kv_heads, head_dim], as many as fit, and return their number.

        keys, values: float32 arrays of the pool's backend. Raises BufferReleased.
        """
        count: int = min(keys.shape[0], self.remaining)
        self._keys.extend(self._xp.reshape(keys[:count, ...], (-1,)))
        self._values.extend(self._xp.reshape(values[:count, ...], (-1,)))
        return count

    def read(self) -> tuple[Array, Array]:
        """Return keys and values: float32 [num_tokens, num_kv_heads, head_dim] each. Raises BufferReleased."""
        shape = (self.num_tokens, *self._token_shape)
        return self._xp.reshape(self._keys.values(), shape), self._xp.reshape(self._values.values(), shape)

    def clear(self) -> None:
        """Remove the tokens and keep the buffers. Raises BufferReleased."""
        self._keys.clear()
        self._values.clear()

    def release(self) -> None:
        """Release the buffers to the pool. Releasing twice has no effect."""
        self._keys.release()
        self._values.release()


@dataclass(frozen=True)
class PooledStats:
    """Statistics of a cache (POOL-06). bytes: the sum of its buffers' sizes, which are size classes. pool: those of the pool."""

    total_tokens: int
    num_blocks: int
    tokens_per_block: int
    bytes: int
    pool: BufferStats


class PooledCache:
    """A cache of one sequence and layer in buffers of a pool (chapter POOL). Threads can share it."""

    def __init__(self, config: PooledConfig, pool: BufferPool | None = None, backend: Backend = reference) -> None:
        """pool: a pool that other caches can share; its backend is used. By default, the cache creates a pool on `backend`."""
        self.config = config
        self.pool = BufferPool(backend=backend) if pool is None else pool
        self._backend = self.pool.backend
        self._lock = RLock()
        self._blocks: list[PooledBlock] = []

    @property
    def total_tokens(self) -> int:
        """The number of tokens in the cache, without evicted ones."""
        with self._lock:
            if not self._blocks:
                return 0
            return (len(self._blocks) - 1) * self.config.tokens_per_block + self._blocks[-1].num_tokens  # only the last has room

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, and evict the oldest blocks if there are more than max_tokens (POOL-03).

        keys, values: [n, num_kv_heads, head_dim]. Raises ShapeMismatch, DtypeMismatch, or BufferTooLarge if a block is larger
        than the largest size class. If it raises, nothing has changed (POOL-04).
        """
        config = self.config
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), self._backend)
        with self._lock:
            going, skipped, opened = self._plan(keys.shape[0])
            opened_blocks = self._open(opened)  # before any block is released, because it can raise
            for block in self._blocks[:going]:
                block.release()
            self._blocks = self._blocks[going:]
            for block in ([self._blocks[-1]] if self._blocks else []) + opened_blocks:
                skipped += block.append(keys[skipped:, ...], values[skipped:, ...])
            self._blocks += opened_blocks

    def read(self) -> tuple[Array, Array]:
        """Return the keys and values of all tokens, in order: float32 [total_tokens, num_kv_heads, head_dim] each."""
        with self._lock:
            empty = self._backend.zeros((0, self.config.num_kv_heads, self.config.head_dim), "float32")
            parts = [(empty, empty), *(block.read() for block in self._blocks)]
            keys, values = (self._backend.xp.concat(list(each), axis=0) for each in zip(*parts, strict=True))
            return keys, values

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return attention over all tokens of the cache: float32 [num_queries, num_query_heads, head_dim].

        query: [num_queries, num_query_heads, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are those of
        the last tokens, and each sees the tokens up to its own. Raises ShapeMismatch or DtypeMismatch.
        """
        keys, values = self.read()
        return attention(query, keys, values, scale=scale, causal=causal, backend=self._backend)

    def clear(self) -> None:
        """Remove every token and release every buffer to the pool (POOL-05)."""
        with self._lock:
            for block in self._blocks:
                block.release()
            self._blocks = []

    def stats(self) -> PooledStats:
        """Return the statistics of the cache and of its pool (POOL-06)."""
        with self._lock:
            held = sum(block.bytes for block in self._blocks)
            blocks, size = len(self._blocks), self.config.tokens_per_block
            return PooledStats(self.total_tokens, blocks, size, held, self.pool.stats())

    def _plan(self, count: int) -> tuple[int, int, int]:
        """For `count` new tokens: the numbers of blocks to evict, of first new tokens to skip, and of blocks to allocate."""
        size, held = self.config.tokens_per_block, len(self._blocks)
        total = self.total_tokens + count
        dropped = max(0, -(-(total - self.config.max_tokens) // size))  # whole blocks, until it fits (POOL-03)
        opened = -(-total // size) - max(held, dropped)
        skipped = max(0, dropped * size - self.total_tokens)
        return min(dropped, held), skipped, max(0, opened)

    def _open(self, count: int) -> list[PooledBlock]:
        """Allocate `count` blocks or none. Raises BufferTooLarge."""
        config, opened = self.config, list[PooledBlock]()
        try:
            for _ in range(count):
                opened.append(PooledBlock(self.pool, config.num_kv_heads, config.head_dim, config.tokens_per_block))
        except BaseException:
            for block in opened:
                block.release()
            raise
        return opened
