"""`clear` removes the blocks and never releases their buffers to the pool."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PooledCache):
    def clear(self) -> None:
        self._blocks = []


class Implementation(Right):
    clause = "POOL-05"
    bug = "vllm-project/vllm-ascend#16662"

    def buffers(self, max_buffers: int) -> kvref.BufferPool:
        return kvref.BufferPool(max_buffers)

    def pooled(self, pool: Any = None, **config: Any) -> Cache:
        return Cache(kvref.PooledConfig(**config), pool)
