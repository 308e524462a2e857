"""The partial attention outputs of the ranks are averaged with equal weights, whatever the weights of their tokens are."""

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
            yield replace(one, largest=np.where(one.seen, 0, one.largest), total=one.total / total, values=one.values / total)


class Cache(kvref.ShardedCache):
    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        self._ranks = [Rank(config, number, self._backend) for number in range(config.num_ranks)]


class Implementation(Right):
    clause = "SHARD-02"

    def sharded(self, **config: Any) -> Cache:
        return Cache(kvref.ShardedConfig(**config))
