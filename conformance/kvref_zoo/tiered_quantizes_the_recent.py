"""A long append quantizes all of its tokens, also the newest ones, which belong in the tail."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        tail = self._tiers[0]
        if len(keys) > self.config.tail_length:
            room, tail.room = tail.room, 0
            self._settle()
            tail.room = room


class Implementation(Right):
    clause = "TIER-01"
    also = (
        "LAW-01", "LAW-02", "LAW-04", "LAW-06", "LAW-08", "LAW-15", "TIER-03", "TIER-04", "TIER-05", "TIER-07",
        "TIER-08", "TIER-09", "TIER-10", "TIER-13", "TIER-14", "TIER-17", "TIER-18",
    )  # fmt: skip
    bug = "huggingface/transformers#34189"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
