"""The store of every format that a tier ever had is kept, also if it contains no token any more."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def __init__(self, config: kvref.TieredConfig) -> None:
        self._kept: list[Any] = []
        super().__init__(config)

    def _adopt(self, config: kvref.TieredConfig) -> None:
        before = {(tier.name, run.store.format.name) for tier in self._tiers for run in tier.runs}
        super()._adopt(config)
        for tier in self._tiers:
            self._kept += [run for run in tier.runs if (tier.name, run.store.format.name) not in before]


class Implementation(Right):
    clause = "TIER-16"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
