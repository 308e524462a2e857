"""The mask counts slots of the ring for positions: once the ring has turned, the wrong tokens are left out."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _attended(self, query: Any, at: Any, keys: Any, values: Any, positions: Any, scale: float | None) -> Any:
        if self.config.chunk or len(at) != 1:
            return super()._attended(query, at, keys, values, positions, scale)
        slots = self._slots(positions)
        order = np.argsort(slots)
        last = np.full(1, slots.max(initial=-1))
        return super()._attended(query, last, keys[order], values[order], slots[order], scale)


class Implementation(Right):
    clause = "WIN-01"
    also = ("WIN-02", "WIN-05", "WIN-06")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
