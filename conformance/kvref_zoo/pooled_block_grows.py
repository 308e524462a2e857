"""A block is filled up to its size class instead of tokens_per_block tokens."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PooledCache):
    def __init__(self, config: kvref.PooledConfig, pool: Any = None) -> None:
        row = 4 * config.num_kv_heads * config.head_dim
        room = next((size // row for size in (1024, 4096, 16384, 65536, 262144) if size >= config.tokens_per_block * row), 0)
        grown = max(1, min(room, config.max_tokens))
        super().__init__(kvref.PooledConfig(config.num_kv_heads, config.head_dim, grown, config.max_tokens), pool)


class Implementation(Right):
    clause = "POOL-01"
    also = ("POOL-02", "POOL-03", "POOL-06")

    def pooled(self, pool: Any = None, **config: Any) -> Cache:
        return Cache(kvref.PooledConfig(**config), pool)
