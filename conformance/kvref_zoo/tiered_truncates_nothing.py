"""A truncation that is not possible changes nothing and raises no error: a rejected draft stays in the cache."""

from contextlib import suppress
from typing import Any

import kvref
from kvref.errors import NotTruncatable
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def truncate(self, length: int) -> None:
        with suppress(NotTruncatable):
            super().truncate(length)


class Implementation(Right):
    clause = "EDIT-06"
    bug = "ml-explore/mlx-lm#1109"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
