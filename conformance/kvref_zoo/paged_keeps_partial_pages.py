"""Blocks are allocated one at a time. If the pool is exhausted, the call raises OutOfBlocks and keeps the blocks it has."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def _prepare(self, more: Mapping[int, int], tables: Any, layers: Any, positions: Any) -> None:
        for table, count in more.items():
            for _ in range(count):
                self._tables.extend({table: 1}, np.array([self.pool.allocate() for _ in range(self.config.num_layers)], np.int32))
        super()._prepare({}, tables, layers, positions)


class Implementation(Right):
    clause = "PAGED-05"
    also = ("LAW-01", "LAW-11", "MOVE-03", "SHARE-07")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
