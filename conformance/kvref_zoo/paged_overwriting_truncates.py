"""A write inside a sequence removes all tokens after the last token written."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        super().write(sequence, layer, start, keys, values)
        if len(keys):
            self._tables.lengths[self._table(sequence), layer] = int(start) + len(keys)


class Implementation(Right):
    clause = "PAGED-09"
    also = ("EDIT-10", "LAW-02", "PAGED-11", "PAGED-18", "SHARE-04", "SHARE-05", "SHARE-07", "SHARE-08")
    bug = "Pushkinist/rMLX#391"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
