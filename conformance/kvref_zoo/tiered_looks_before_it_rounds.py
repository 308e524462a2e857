"""The range of a token is checked before it is rounded to the dtype of the tail.

A token is accepted that cannot migrate later, and then every append fails.
"""

from typing import Any

import numpy as np

import kvref
from kvref.errors import NonFinite
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def _check_storable(self, name: str, tokens: Any) -> None:
        flat = np.asarray(tokens, np.float64).reshape(len(tokens), self.config.num_kv_heads * self.config.head_dim)
        with np.errstate(over="ignore"):
            held = flat.astype(np.float16) if self.config.tail_dtype == "float16" and self.config.tail_length else flat
            ranges = (flat.max(axis=1) - flat.min(axis=1)).astype(np.float32)
        if not (np.isfinite(held).all() and np.isfinite(ranges).all()):
            raise NonFinite(f"{name}: expected finite values, and ranges within float32")


class Implementation(Right):
    clause = "TIER-13"
    also = ("LAW-01", "LAW-04", "TIER-01")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
