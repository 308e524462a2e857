"""The capacity is doubled until the tokens fit. From a capacity of 0 this loop never ends."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def _grow(self, needed: int) -> None:
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        super()._grow(needed)


class Implementation(Right):
    clause = "CONTIG-04"
    also = ("CONTIG-02", "CONTIG-05", "CONTIG-09")

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
