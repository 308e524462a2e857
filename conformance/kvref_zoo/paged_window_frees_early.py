"""`release_before` also frees the block that contains the first token of the window."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def release_before(self, sequence: int, position: int) -> None:
        table = self._table(sequence)
        super().release_before(sequence, position)
        entries = min(-(-position // self.config.block_size), int(self._tables.counts[table]))
        self.pool.free_many(self._tables.release(table, entries))


class Implementation(Right):
    clause = "WIN-09"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
