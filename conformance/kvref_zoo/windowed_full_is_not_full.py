"""A ring that is exactly full is treated as having room: the next token overwrites the newest token instead of the oldest."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _slots(self, positions: Any) -> Any:
        behind, ring = np.asarray(positions) - self.config.sinks, self._ring
        place = np.where(behind == ring, ring - 1, behind % ring)
        return np.where(behind < 0, positions, self.config.sinks + place)


class Implementation(Right):
    clause = "WIN-03"
    also = ("EDIT-02", "LAW-04", "LAW-05", "WIN-01", "WIN-02", "WIN-05", "WIN-06", "WIN-07", "WIN-10")
    bug = "huggingface/transformers#37574"

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
