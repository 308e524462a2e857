"""`write` copies shared blocks in order until no block is free, and keeps the copies that it has already made."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def _prepare(self, more: Mapping[int, int], tables: Any, layers: Any, positions: Any) -> None:
        size = self.config.block_size
        places = self._shared(tables, layers, positions // size)
        if len(places) > 1:
            for table, layer, entry in places:
                super()._prepare({}, table, layer, np.array([entry * size]))
        super()._prepare(more, tables, layers, positions)


class Implementation(Right):
    clause = "SHARE-07"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
