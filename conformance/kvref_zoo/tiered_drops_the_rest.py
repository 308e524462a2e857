"""A flat array that is not a whole number of tokens is cut to a whole number, and no error is raised."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def append(self, keys: Any, values: Any) -> None:
        width = self.config.num_kv_heads * self.config.head_dim
        if keys.ndim == 1 and values.ndim == 1:
            count = min(keys.size, values.size) // width
            keys, values = (part[: count * width].reshape(count, -1, self.config.head_dim) for part in (keys, values))
        super().append(keys, values)


class Implementation(Right):
    clause = "TIER-09"
    also = ("LAW-01", "LAW-10")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
