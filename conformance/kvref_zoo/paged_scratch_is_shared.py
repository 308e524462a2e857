"""Every `gather` returns the same scratch array: the result of one read changes with the next."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    _scratch = np.zeros((2, 64, 16, 16), np.float32)

    def gather(self, sequence: int, layer: int) -> Any:
        keys, values = super().gather(sequence, layer)
        views = [part[tuple(slice(0, axis) for axis in keys.shape)] for part in self._scratch]
        views[0][...], views[1][...] = keys, values
        return views[0], views[1]


class Implementation(Right):
    clause = "LAW-17"
    also = ("ATTN-10", "EDIT-10", "MOVE-01", "MOVE-05", "PAGED-12", "PAGED-18")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
