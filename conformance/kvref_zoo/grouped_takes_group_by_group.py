"""`step` allocates blocks for one group at a time. If there are none left for the second group, it keeps those of the first."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.GroupedCache):
    def step(self, sequence: int, keys: Any, values: Any) -> None:
        try:
            super().step(sequence, keys, values)
        except kvref.errors.OutOfBlocks:
            if self.num_free_blocks:
                self.pool.allocate()
            raise


class Implementation(Right):
    clause = "GROUP-03"

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
