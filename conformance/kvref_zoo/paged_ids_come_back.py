"""The id of a dropped sequence is reused for the next one: a canceled request reads another user's tokens."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def drop(self, sequence: int) -> None:
        super().drop(sequence)
        self._next_sequence = sequence


class Implementation(Right):
    clause = "PAGED-01"
    also = ("LAW-03", "MOVE-03", "SHARE-03", "SHARE-09")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
