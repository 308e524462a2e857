"""The total number of tokens is wrong by one after tokens have migrated to the store."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    @property
    def total_tokens(self) -> int:
        with self._lock:
            return sum(len(tier) for tier in self._tiers) + (1 if len(self._tiers[2]) > 1 else 0)

    def _evict(self, count: int) -> None:
        super()._evict(max(0, sum(len(tier) for tier in self._tiers) + count - self.total_tokens))


class Implementation(Right):
    clause = "TIER-06"
    also = ("ATTN-10", "EDIT-01", "LAW-04", "LAW-05", "MOVE-01", "TIER-05", "TIER-07", "TIER-09", "TIER-13")
    bug = "NVIDIA/TensorRT-LLM#12834"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
