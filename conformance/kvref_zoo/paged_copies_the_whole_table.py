"""One token written to a fork copies all blocks that the fork shares: forking saves no memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def _prepare(self, more: Mapping[int, int], tables: Any, layers: Any, positions: Any) -> None:
        if np.size(positions) and np.ndim(tables) == np.ndim(layers) == 0:
            positions = np.arange(self._tables.capacity(tables))
        super()._prepare(more, tables, layers, positions)


class Implementation(Right):
    clause = "SHARE-05"
    also = ("PAGED-03",)

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
