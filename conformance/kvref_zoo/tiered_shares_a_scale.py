"""Values are quantized with the range of their keys."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def _enter(self, index: int, keys: Any, values: Any) -> None:
        if index > 0 and keys.shape[0]:
            flat = keys.reshape(len(keys), -1)
            low, high = flat.min(axis=1)[:, None, None], flat.max(axis=1)[:, None, None]
            values = np.clip(values, low, high)
        super()._enter(index, keys, values)


class Implementation(Right):
    clause = "FMT-AFF-03"
    also = (
        "LAW-01", "LAW-02", "LAW-04", "LAW-08", "LAW-15", "TIER-01", "TIER-02", "TIER-03", "TIER-04", "TIER-05",
        "TIER-09", "TIER-10", "TIER-13", "TIER-14", "TIER-15",
    )  # fmt: skip

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
