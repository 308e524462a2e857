"""The rank of a token is computed with the kernel's block size, half of the cache's.

The second half of each block is on the next rank.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.sharded import _Rank
from kvref_zoo.right import Right


class Rank(_Rank):
    def positions(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        every: NDArray[np.int64] = np.arange(start, self.length if stop is None else stop)
        kernel = max(1, self._config.block_size // 2)
        return np.asarray(every[every // kernel % self._config.token_ranks == self._column])

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        kernel = max(1, self._config.block_size // 2)
        own = positions // (kernel * self._config.token_ranks) * kernel + positions % kernel
        found: NDArray[np.int64] = np.array(self.table, np.int64)[own // self._config.block_size]
        return found * self._config.block_size + own % self._config.block_size


class Cache(kvref.ShardedCache):
    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        self._ranks = [Rank(config, number, self._backend) for number in range(config.num_ranks)]


class Implementation(Right):
    clause = "SHARD-02"
    also = ("EDIT-01", "EDIT-02", "EDIT-03", "SHARD-01", "SHARD-03", "SHARD-04")
    bug = "vllm-project/vllm#51031"

    def sharded(self, **config: Any) -> Cache:
        return Cache(kvref.ShardedConfig(**config))
