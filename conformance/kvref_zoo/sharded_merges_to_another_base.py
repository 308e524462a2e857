"""Each rank reports the base-2 logarithm of its sum of weights, and they are merged as natural logarithms."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import kvref
from kvref.pieces import Partial
from kvref.sharded import _Rank
from kvref_zoo.right import Right


class Rank(_Rank):
    def partials(self, query: Any, at: Any, scale: float) -> Iterator[Partial]:
        for one in super().partials(query, at, scale):
            total = np.where(one.total > 0, one.total, 1)
            logarithm = (one.largest + np.log(total)) / np.float32(math.log(2))
            mean = replace(one, largest=logarithm, total=np.ones_like(total), values=one.values / total)
            yield replace(mean, total=np.where(one.seen, mean.total, 0), values=np.where(one.seen, mean.values, 0))


class Cache(kvref.ShardedCache):
    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        self._ranks = [Rank(config, number, self._backend) for number in range(config.num_ranks)]


class Implementation(Right):
    clause = "SHARD-02"
    bug = "vllm-project/vllm#28840"

    def sharded(self, **config: Any) -> Cache:
        return Cache(kvref.ShardedConfig(**config))
