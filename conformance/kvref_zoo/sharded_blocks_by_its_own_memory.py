"""Each rank allocates blocks for its own tokens only, so that the block tables of the ranks differ in length."""

from typing import Any

import kvref
from kvref.sharded import _Rank
from kvref_zoo.right import Right


class Rank(_Rank):
    def be(self, length: int) -> None:
        own = len(self.positions(0, length))
        super().be(own * self._config.token_ranks)
        self.length = length


class Cache(kvref.ShardedCache):
    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        self._ranks = [Rank(config, number, self._backend) for number in range(config.num_ranks)]


class Implementation(Right):
    clause = "SHARD-03"
    also = ("SHARD-04",)
    bug = "GeeeekExplorer/nano-vllm#187"

    def sharded(self, **config: Any) -> Cache:
        return Cache(kvref.ShardedConfig(**config))
