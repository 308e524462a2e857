"""`drop` frees the blocks of the first layer again for each further layer: the pool reports more free blocks than it has."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def drop(self, sequence: int) -> None:
        first = self.block_table(sequence, 0)
        super().drop(sequence)
        again = first * (self.config.num_layers - 1)
        self.pool._free = np.append(self.pool._free[: self.pool.num_free], np.array(again, np.int32))
        self.pool._num_free += len(again)


class Implementation(Right):
    clause = "PAGED-07"
    also = (
        "EDIT-03", "EDIT-04", "EDIT-05", "EDIT-10", "LAW-03", "LAW-19", "MOVE-05", "PAGED-12", "PAGED-13", "PAGED-15",
        "SHARE-04", "SHARE-06", "SHARE-08", "SHARE-09", "WIN-09",
    )  # fmt: skip
    bug = "vllm-project/vllm#42571"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
