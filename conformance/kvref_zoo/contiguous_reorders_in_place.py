"""`reorder` copies the rows in place, in order: a row is copied from a source that has already been overwritten."""

from collections.abc import Sequence
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def reorder(self, rows: Sequence[int]) -> None:
        batch = self.config.batch_size
        if len(rows) != batch or not all(0 <= row < batch for row in rows):
            super().reorder(rows)
            return
        for buffer in self.raw():
            for row, source in enumerate(rows):
                buffer[row] = buffer[source]


class Implementation(Right):
    clause = "EDIT-07"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
