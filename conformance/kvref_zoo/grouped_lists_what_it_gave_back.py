"""A block that a window released stays in the block table. It is freed a second time and allocated to two owners."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref_zoo.right import Right


class Tables(kvref.BlockTables):
    def release(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
        return self.before(table, counts)


class Cache(kvref.GroupedCache):
    def __init__(self, config: kvref.GroupedConfig) -> None:
        super().__init__(config)
        self._tables = Tables(config.num_groups, config.block_size)


class Implementation(Right):
    clause = "GROUP-02"
    also = ("GROUP-01", "GROUP-03", "GROUP-04", "GROUP-05", "GROUP-06", "GROUP-07", "SHARE-03")
    bug = "vllm-project/vllm#42571"

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
