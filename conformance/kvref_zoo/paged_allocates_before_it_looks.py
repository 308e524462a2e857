"""`write` allocates blocks before it checks the layer: every invalid call costs memory."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        if isinstance(start, int) and 0 <= start <= self.length(sequence, 0):
            self.ensure_capacity(sequence, start + len(keys))
        super().write(sequence, layer, start, keys, values)


class Implementation(Right):
    clause = "LAW-11"
    also = ("FMT-LEVEL-04", "LAW-01", "LAW-10", "PAGED-18")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
