"""Values are quantized with the range of their keys."""

from collections.abc import Callable
from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def __init__(self, config: kvref.TieredConfig) -> None:
        super().__init__(config)
        for tier in self._tiers[1:]:
            tier.write = clipping(tier.write)  # type: ignore[method-assign, assignment]


def clipping(write: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def clipped(keys: Any, values: Any) -> None:
        if len(keys):
            values = np.clip(values, keys.min(axis=(1, 2), keepdims=True), keys.max(axis=(1, 2), keepdims=True))
        write(keys, values)

    return clipped


class Implementation(Right):
    clause = "FMT-AFF-03"
    also = (
        "LAW-01", "LAW-02", "LAW-04", "LAW-08", "LAW-15", "MOVE-01", "MOVE-07", "TIER-01", "TIER-02", "TIER-03",
        "TIER-04", "TIER-05", "TIER-09", "TIER-10", "TIER-13", "TIER-14", "TIER-15", "TIER-17", "TIER-18",
    )  # fmt: skip

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
