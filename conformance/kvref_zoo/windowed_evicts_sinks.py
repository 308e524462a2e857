"""The ring uses all slots, also those of the sink tokens: sink tokens are overwritten."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _slots(self, positions: Any) -> Any:
        return np.asarray(positions) % (self.config.sinks + self._ring)


class Implementation(Right):
    clause = "WIN-05"
    also = ("LAW-04", "LAW-05", "MOVE-01", "WIN-03", "WIN-06", "WIN-07", "WIN-10")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
