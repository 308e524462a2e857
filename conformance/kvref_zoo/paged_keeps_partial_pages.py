"""Takes pages one at a time and keeps those it got when the pool runs dry."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def _ensure(self, rows: Any, num_tokens: Any) -> None:
        for row, count in zip(rows, num_tokens, strict=True):
            while self._tables.capacity(row) < count:
                self._tables.extend({row: 1}, np.array([self.pool.allocate() for _ in range(self.config.num_layers)]))


class Implementation(Right):
    clause = "PAGED-05"
    also = ("LAW-01", "LAW-11")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
