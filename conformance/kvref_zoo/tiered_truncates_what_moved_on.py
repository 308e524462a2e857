"""`truncate` succeeds although tokens that should be in the tail afterwards have migrated: they read as quantized."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def truncate(self, length: int) -> None:
        if self._next - self.total_tokens <= length < self._next:
            self._moved_at = min(self._moved_at, length)
        super().truncate(length)


class Implementation(Right):
    clause = "EDIT-06"
    bug = "ml-explore/mlx-lm#1494"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
