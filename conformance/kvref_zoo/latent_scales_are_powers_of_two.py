"""Scales are written as float32 and read by their exponents alone: values are too small unless the scale is a power of two."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def read(self) -> Any:
        rows = super().read()
        if self.config.dtype == "packed" and self.length:
            scale = np.asarray(self._stores[0].stored(range(self.length)).scale)
            rows[:, : self.config.rank] *= (np.exp2(np.floor(np.log2(scale))) / scale).repeat(128, axis=1)
        return rows


class Implementation(Right):
    clause = "MLA-04"
    also = ("LAW-04", "MLA-01", "MLA-02", "MLA-05", "EDIT-01", "EDIT-03")
    bug = "vllm-project/vllm#54563"

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
