"""Each call evicts at most one token, however many tokens it appends."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def _evict(self, count: int) -> None:
        super()._evict(min(count, 1))


class Implementation(Right):
    clause = "TIER-05"
    also = ("EDIT-03", "LAW-04", "TIER-03", "TIER-07", "TIER-09", "TIER-10", "TIER-14", "TIER-15", "TIER-17")
    bug = "ml-explore/mlx-lm#1914"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
