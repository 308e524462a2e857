"""A block that was evicted for other tokens is still found by its old tokens."""

from typing import Any

import kvref
from kvref.prefix import FindablePool
from kvref_zoo.right import Right


class Pool(FindablePool):
    def _lose(self, block: int) -> None:
        """Does nothing: the block stays in the index."""


class Cache(kvref.PrefixCache):
    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self.pool = Pool(config.num_blocks)


class Implementation(Right):
    clause = "PREFIX-07"
    also = ("PREFIX-05", "PREFIX-06", "PREFIX-08", "PREFIX-09", "PREFIX-13", "PREFIX-16")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
