"""Copy-on-write copies the keys and not the values: the new block keeps the values of its former owner."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self._store.values.copy = lambda *what: None  # type: ignore[method-assign]


class Implementation(Right):
    clause = "SHARE-05"
    also = ("EDIT-05", "EDIT-10", "PAGED-18", "SHARE-04", "SHARE-06", "SHARE-07", "SHARE-08", "SHARE-09")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
