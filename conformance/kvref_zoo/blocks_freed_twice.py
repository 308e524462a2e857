"""A block that was allocated once can be freed any number of times. It is then on the free list twice, and gets two owners."""

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._handed_out = set[int]()

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        blocks = super().allocate_many(count)
        self._handed_out.update(blocks.tolist())
        return blocks

    def free(self, block: int) -> None:
        if block not in self._handed_out:
            super().free(block)  # raises
        self._references[block] = 0
        self._free = np.insert(self._free, self._num_free, block)
        self._num_free += 1


class Implementation(Right):
    clause = "BLOCK-05"
    also = ("SHARE-01",)
    bug = "LMCache/LMCache#5005"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
