"""A sequence overwrites a cached block in place if no other sequence has it: later hits on the old tokens read the new ones."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    _kept = kvref.PagedCache._kept
    _others = kvref.PagedCache._others


class Implementation(Right):
    clause = "PREFIX-14"
    also = ("EDIT-04", "PREFIX-02", "PREFIX-09", "SHARE-05", "SHARE-07")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
