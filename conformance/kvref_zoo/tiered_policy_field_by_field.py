"""A policy is changed a field at a time: what comes before a wrong field stays, and what fits only together is refused."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def update_policy(self, **changes: Any) -> None:
        for name, value in changes.items():
            super().update_policy(**{name: value})


class Implementation(Right):
    clause = "TIER-10"
    also = ("LAW-04", "TIER-01", "TIER-02", "TIER-08", "TIER-14")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
