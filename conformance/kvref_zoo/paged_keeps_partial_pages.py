"""Takes pages one at a time and keeps those it got when the pool runs dry."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        table = self._find(sequence).table
        for layer in range(self.config.num_layers):
            while table.capacity(layer) < num_tokens:
                table.append(layer, self.pool.allocate())


class Implementation(Right):
    clause = "PAGED-05"
    also = ("LAW-01", "LAW-11")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
