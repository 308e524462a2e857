"""`append` increases the length before it checks its arguments.

After a rejected append the cache reads a token that was never written.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def append(self, keys: Any, values: Any) -> None:
        before = self.seq_len
        try:
            super().append(keys, values)
        except kvref.errors.ShapeMismatch:
            self.seq_len = min(before + 1, self.capacity)
            raise


class Implementation(Right):
    clause = "LAW-01"
    also = ("LAW-10",)

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
