"""Each change of the policy creates a store, and a store that contains no token is not freed."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def __init__(self, config: kvref.TieredConfig) -> None:
        super().__init__(config)
        for tier in self._tiers:
            tier.drop_drained = lambda: None  # type: ignore[method-assign]


class Implementation(Right):
    clause = "TIER-16"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
