"""`truncate` removes tokens from the tail only: removed tokens that had already been quantized stay in the cache."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def truncate(self, length: int) -> None:
        tail, gone = len(self._tiers[0]), self._next - length
        if isinstance(gone, int) and tail < gone <= self._next and length >= self._moved_at:
            length = self._next - tail
        super().truncate(length)


class Implementation(Right):
    clause = "EDIT-01"
    also = ("EDIT-03", "EDIT-06", "TIER-17")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
