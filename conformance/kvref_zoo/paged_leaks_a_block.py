"""`drop` leaves one block per sequence allocated: a server has no free blocks after some thousand requests."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def drop(self, sequence: int) -> None:
        for block in self._tables.close(self._table(sequence))[1:]:
            self.pool.free(block)
        del self._table_of[sequence]


class Implementation(Right):
    clause = "PAGED-07"
    also = (
        "EDIT-04", "EDIT-05", "EDIT-10", "LAW-03", "MOVE-05", "PAGED-12", "PAGED-15", "PAGED-18", "SHARE-04",
        "SHARE-06", "SHARE-08", "SHARE-09", "WIN-09",
    )  # fmt: skip
    bug = "kekzl/imp#1115"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
