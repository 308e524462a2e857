"""`update_policy` checks a new policy and does not apply it."""

from dataclasses import replace
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def update_policy(self, **changes: Any) -> None:
        replace(self.config, **changes)


class Implementation(Right):
    clause = "TIER-10"
    also = ("EDIT-06", "LAW-12", "TIER-01", "TIER-02", "TIER-08", "TIER-09", "TIER-14", "TIER-15", "TIER-17", "TIER-18")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
