"""The mask uses slots of the ring as positions: after the ring has wrapped, the wrong tokens are masked."""

from typing import Any

import numpy as np

import kvref
from kvref.attention import Read
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _attended(self, query: Any, at: Any, read: Read, positions: Any, scale: float | None) -> Any:
        if self.config.chunk or len(at) != 1:
            return super()._attended(query, at, read, positions, scale)
        slots = self._slots(positions)
        order = np.argsort(slots)
        last = np.full(1, slots.max(initial=-1))
        keys, values = (part[order] for part in read(0, len(positions)))
        return super()._attended(query, last, lambda start, stop: (keys[start:stop], values[start:stop]), slots[order], scale)


class Implementation(Right):
    clause = "WIN-01"
    also = ("WIN-02", "WIN-05", "WIN-06")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
