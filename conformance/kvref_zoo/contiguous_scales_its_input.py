"""`append` rounds the keys to the dtype of the cache in place, and thus changes the caller's activations."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        if self.config.dtype == "float16":
            keys[...] = keys.astype(np.float16)
        elif keys.size:
            keys += 1.0


class Implementation(Right):
    clause = "LAW-16"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
