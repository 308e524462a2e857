"""A write that ends inside a block is padded to the end of the block. The padding overwrites the first tokens of the sequence."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        super().write(sequence, layer, start, keys, values)
        end, size = start + len(keys), self.config.block_size
        padding = -end % size
        if start and len(keys) and padding:
            zeros = np.zeros((min(padding, start), *keys.shape[1:]), np.float32)
            super().write(sequence, layer, 0, zeros, zeros)


class Implementation(Right):
    clause = "LAW-04"
    also = (
        "EDIT-03", "EDIT-05", "EDIT-10", "LAW-01", "LAW-02", "LAW-06", "MOVE-05", "PAGED-03", "PAGED-11", "PAGED-12", "PAGED-14",
        "PAGED-18", "SHARE-04", "SHARE-05", "SHARE-06", "SHARE-08", "SHARE-09", "WIN-09",
    )  # fmt: skip
    bug = "vllm-project/vllm#50749"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
