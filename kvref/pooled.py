"""The pooled cache: tokens in blocks whose memory comes from a shared buffer pool.

A block holds up to tokens_per_block tokens in two buffers, one for keys and one for values. Appending fills the last block and
opens new ones; past max_tokens whole blocks go, oldest first, and their memory returns to the pool.
"""

from dataclasses import dataclass
from math import prod
from threading import RLock

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.buffers import VALUE_BYTES, BufferPool, BufferStats
from kvref.errors import ConfigError, whole, whole_fields
from kvref.inputs import accept_pair


@dataclass(frozen=True)
class PooledConfig:
    """tokens_per_block may not pass max_tokens: a cache must be able to keep its newest block."""

    num_kv_heads: int = 8
    head_dim: int = 128
    tokens_per_block: int = 16
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "tokens_per_block", "max_tokens")
        if self.tokens_per_block > self.max_tokens:
            raise ConfigError(f"tokens_per_block: expected at most max_tokens {self.max_tokens}, got {self.tokens_per_block}")


class PooledBlock:
    """Up to `max_tokens` tokens: never more, however large the buffers' size class is (POOL-01)."""

    def __init__(self, pool: BufferPool, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        """Takes two buffers from the pool. Raises ConfigError, or BufferTooLarge, holding none."""
        self.max_tokens = whole("max_tokens", max_tokens)
        self._token_shape = whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        num_bytes = self.max_tokens * self._token_shape[0] * self._token_shape[1] * VALUE_BYTES
        self._keys, self._values = pool.acquire_pair(num_bytes)
        self._xp = pool.backend.xp

    @property
    def num_tokens(self) -> int:
        return self._keys.length // prod(self._token_shape)

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def is_full(self) -> bool:
        return self.remaining == 0

    @property
    def bytes(self) -> int:
        return self._keys.size + self._values.size

    def append(self, keys: Array, values: Array) -> int:
        """Append as many of the tokens [n, num_kv_heads, head_dim] as fit; says how many."""
        count: int = min(keys.shape[0], self.remaining)
        self._keys.extend(self._xp.reshape(keys[:count, ...], (-1,)))
        self._values.extend(self._xp.reshape(values[:count, ...], (-1,)))
        return count

    def read(self) -> tuple[Array, Array]:
        """float32 [num_tokens, num_kv_heads, head_dim] each."""
        shape = (self.num_tokens, *self._token_shape)
        return self._xp.reshape(self._keys.values(), shape), self._xp.reshape(self._values.values(), shape)

    def clear(self) -> None:
        self._keys.clear()
        self._values.clear()

    def release(self) -> None:
        self._keys.release()
        self._values.release()


@dataclass(frozen=True)
class PooledStats:
    """bytes: the size classes of the buffers held. pool: the buffer pool's own statistics."""

    total_tokens: int
    num_blocks: int
    tokens_per_block: int
    bytes: int
    pool: BufferStats


class PooledCache:
    def __init__(self, config: PooledConfig, pool: BufferPool | None = None, backend: Backend = reference) -> None:
        """pool: a pool to share with other caches, whose backend is used; unless given, one of its own on `backend`."""
        self.config = config
        self.pool = BufferPool(backend=backend) if pool is None else pool
        self._backend = self.pool.backend
        self._lock = RLock()
        self._blocks: list[PooledBlock] = []

    @property
    def total_tokens(self) -> int:
        with self._lock:
            return sum(block.num_tokens for block in self._blocks)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [n, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch, or BufferTooLarge when a block fits no buffer; the append then leaves nothing
        behind (POOL-04).
        """
        config = self.config
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), self._backend)
        with self._lock:
            going, skipped, opened = self._plan(keys.shape[0])
            opened_blocks = self._open(opened)  # before anything goes: it may raise
            for block in self._blocks[:going]:
                block.release()
            self._blocks = self._blocks[going:]
            for block in ([self._blocks[-1]] if self._blocks else []) + opened_blocks:
                skipped += block.append(keys[skipped:, ...], values[skipped:, ...])
            self._blocks += opened_blocks

    def read(self) -> tuple[Array, Array]:
        """Every token in order, float32 [total, num_kv_heads, head_dim]."""
        with self._lock:
            empty = self._backend.zeros((0, self.config.num_kv_heads, self.config.head_dim), "float32")
            parts = [(empty, empty), *(block.read() for block in self._blocks)]
            keys, values = (self._backend.xp.concat(list(each), axis=0) for each in zip(*parts, strict=True))
            return keys, values

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over every token."""
        keys, values = self.read()
        return attention(query, keys, values, scale=scale, causal=causal, backend=self._backend)

    def clear(self) -> None:
        """Forget every token and give every buffer back (POOL-05)."""
        with self._lock:
            for block in self._blocks:
                block.release()
            self._blocks = []

    def stats(self) -> PooledStats:
        with self._lock:
            held = sum(block.bytes for block in self._blocks)
            blocks, size = len(self._blocks), self.config.tokens_per_block
            return PooledStats(self.total_tokens, blocks, size, held, self.pool.stats())

    def _plan(self, count: int) -> tuple[int, int, int]:
        """For `count` more tokens: blocks that go, leading tokens that would go with them, blocks to open."""
        size, held = self.config.tokens_per_block, len(self._blocks)
        total = self.total_tokens + count
        dropped = max(0, -(-(total - self.config.max_tokens) // size))  # whole blocks, until it fits (POOL-03)
        opened = -(-total // size) - max(held, dropped)
        skipped = max(0, dropped * size - self.total_tokens)
        return min(dropped, held), skipped, max(0, opened)

    def _open(self, count: int) -> list[PooledBlock]:
        config, opened = self.config, list[PooledBlock]()
        try:
            for _ in range(count):
                opened.append(PooledBlock(self.pool, config.num_kv_heads, config.head_dim, config.tokens_per_block))
        except BaseException:
            for block in opened:
                block.release()
            raise
        return opened
