"""A long step is written to the ring before it is read: tokens that its first queries see are overwritten."""

from typing import Any

import numpy as np

import kvref
from kvref.attention import Read
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _attended(self, query: Any, at: Any, read: Read, positions: Any, scale: float | None) -> Any:
        if not len(at):
            return super()._attended(query, at, read, positions, scale)
        left = np.flatnonzero((positions < self.config.sinks) | (positions > at[-1] - self._ring))
        keys, values = (part[left] for part in read(0, len(positions)))
        return super()._attended(query, at, lambda start, stop: (keys[start:stop], values[start:stop]), positions[left], scale)


class Implementation(Right):
    clause = "WIN-02"
    also = ("LAW-05", "WIN-01", "WIN-05", "WIN-06", "WIN-07", "WIN-10")
    bug = "pytorch/executorch#20346"

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
