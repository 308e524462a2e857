"""A packed row has several scales, and all of its numbers are read with the first."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def read(self) -> Any:
        rows = super().read()
        if self.config.dtype == "packed" and self.length:
            scale = np.asarray(self._stores[0].stored(range(self.length)).scale).repeat(128, axis=1)
            rows[:, : self.config.rank] *= scale[:, :1] / scale
        return rows


class Implementation(Right):
    clause = "MLA-04"
    also = ("LAW-04", "MLA-01", "MLA-02", "MLA-05", "EDIT-01", "EDIT-03")

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
