"""`num_used` never decreases. After some time the pool reports that it is full, and the scheduler admits no more requests."""

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    _ever = 0

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        blocks = super().allocate_many(count)
        self._ever += len(blocks)
        return blocks

    @property
    def num_used(self) -> int:
        return self._ever


class Implementation(Right):
    clause = "LAW-03"
    also = ("BLOCK-05", "BLOCK-07", "LAW-19", "SHARE-01", "SHARE-02")
    bug = "xLLM-AI/xllm#829"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
