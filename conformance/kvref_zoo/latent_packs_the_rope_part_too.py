"""The rope part of a packed row is quantized to FP8, with a scale of its own, before it is stored as bfloat16."""

from typing import Any

import numpy as np

import kvref
from kvref.formats import get_format
from kvref_zoo.right import Right

FP8 = get_format("float8_e4m3fn")


class Cache(kvref.LatentCache):
    def append(self, latent: Any, rope: Any) -> None:
        shape = np.shape(rope)
        whole = self.config.dtype == "packed" and rope.dtype == np.float32 and len(shape) == 2 and np.isfinite(rope).all()
        super().append(latent, FP8.dequantize(FP8.quantize(rope), shape[1]) if whole else rope)


class Implementation(Right):
    clause = "MLA-04"
    also = ("LAW-04", "MLA-01", "MLA-05", "EDIT-01", "EDIT-03")

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
