"""Wrong pooled caches."""

from typing import Any

import kvref
from kvref_zoo.mutant import mutant


@mutant("POOL-01", also="POOL-02 POOL-03 POOL-04 POOL-06")
class PooledBlockGrows(kvref.PooledCache):
    """A block is filled up to its size class instead of tokens_per_block tokens."""

    def __init__(self, config: kvref.PooledConfig, pool: Any = None) -> None:
        row = 4 * config.num_kv_heads * config.head_dim
        room = next((size // row for size in (1024, 4096, 16384, 65536, 262144) if size >= config.tokens_per_block * row), 0)
        grown = max(1, min(room, config.max_tokens))
        super().__init__(kvref.PooledConfig(config.num_kv_heads, config.head_dim, grown, config.max_tokens), pool)


@mutant("POOL-05", seen_in="vllm-project/vllm-ascend#16662")
class PooledClearKeepsItsBuffers(kvref.PooledCache):
    """`clear` removes the blocks and never releases their buffers to the pool."""

    def clear(self) -> None:
        self._blocks = []
