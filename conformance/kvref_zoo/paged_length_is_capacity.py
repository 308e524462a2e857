"""`length` returns the capacity instead of the number of tokens: old contents of unused slots are read as tokens."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def length(self, sequence: int, layer: int) -> int:
        super().length(sequence, layer)
        return self._tables.capacity(self._table(sequence))


class Implementation(Right):
    clause = "PAGED-09"
    also = (
        "EDIT-01", "EDIT-02", "EDIT-03", "EDIT-04", "EDIT-05", "EDIT-06", "EDIT-10", "FMT-LEVEL-04", "LAW-01", "LAW-02",
        "LAW-04", "LAW-05", "LAW-06", "LAW-07", "LAW-08", "LAW-10", "LAW-13", "LAW-14", "LAW-15", "LAW-17", "MOVE-01",
        "MOVE-03", "MOVE-04", "MOVE-05", "PAGED-07", "PAGED-08", "PAGED-10", "PAGED-11", "PAGED-12", "PAGED-14",
        "PAGED-16", "PAGED-18", "SHARE-03", "SHARE-04", "SHARE-05", "SHARE-06", "SHARE-07", "SHARE-08", "SHARE-09",
        "WIN-09",
    )  # fmt: skip
    bug = "vllm-project/vllm#43990"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
