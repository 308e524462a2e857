"""`read` uses positions as slots of the ring, which is wrong after the ring has wrapped."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def read(self, positions: Any) -> Any:
        super().read(positions)
        return self._store.read(np.array(positions, np.int64) % (self.config.sinks + self._ring))


class Implementation(Right):
    clause = "WIN-03"
    also = ("LAW-04", "LAW-05", "WIN-05", "WIN-06", "WIN-10")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
