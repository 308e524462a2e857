"""`drop` frees only the blocks that are full: a last block that is partly filled never returns to the pool."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def drop(self, sequence: int) -> None:
        number, size = self._table(sequence), self.config.block_size
        for layer in range(self.config.num_layers):
            filled = self.length(sequence, layer) // size
            partly = filled + 1 if self.length(sequence, layer) % size else filled
            table = self.block_table(sequence, layer)
            for block in table[:filled] + table[partly:]:
                self.pool.free(block)
        self._tables.close(number)
        del self._table_of[sequence]


class Implementation(Right):
    clause = "PAGED-07"
    also = (
        "EDIT-04", "EDIT-05", "EDIT-10", "LAW-03", "MOVE-03", "MOVE-05", "PAGED-15", "PAGED-18", "SHARE-04", "SHARE-06",
        "SHARE-08", "SHARE-09", "WIN-09",
    )  # fmt: skip

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
