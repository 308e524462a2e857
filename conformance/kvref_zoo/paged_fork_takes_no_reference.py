"""`fork` copies the block table and adds no references: the first sequence to be dropped frees the blocks of the others."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def fork(self, sequence: int) -> int:
        child = self.create()
        table = self._tables.fork(self._table(sequence))
        self._tables.close(self._table_of[child])
        self._table_of[child] = table
        return child

    def drop(self, sequence: int) -> None:
        held = self._tables.close(self._table(sequence))
        self.pool.free_many(held[self.pool._references[held] > 0])
        del self._table_of[sequence]


class Implementation(Right):
    clause = "SHARE-06"
    also = (
        "EDIT-04", "EDIT-05", "EDIT-10", "MOVE-05", "PAGED-08", "PAGED-18", "SHARE-04", "SHARE-05", "SHARE-07",
        "SHARE-08", "SHARE-09",
    )  # fmt: skip

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
