"""Dropping a sequence frees the first layer's blocks once a layer: the pool ends up with more free blocks than it has."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def drop(self, sequence: int) -> None:
        first = self.block_table(sequence, 0)
        super().drop(sequence)
        self.pool._free += first * (self.config.num_layers - 1)


class Implementation(Right):
    clause = "PAGED-07"
    also = ("LAW-03", "PAGED-13")
    bug = "vllm-project/vllm#42571"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
