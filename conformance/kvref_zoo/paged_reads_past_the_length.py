"""`read` accepts any position within the capacity: it returns what an earlier owner of the block wrote there."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def read(self, sequence: int, layer: int, positions: Any) -> Any:
        table, length = self._table(sequence), self.length(sequence, layer)
        if all(length <= position < self._tables.capacity(table) for position in positions):
            return self._store.read([self._tables.slots(table, layer, position) for position in positions])
        return super().read(sequence, layer, positions)


class Implementation(Right):
    clause = "LAW-05"
    also = ("EDIT-01",)
    bug = "vllm-project/vllm#35219"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
