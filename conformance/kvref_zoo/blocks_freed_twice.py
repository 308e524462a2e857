"""A block that was handed out once can be freed without end: it is on the free list twice, and gets two owners next time."""

import numpy as np

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._handed_out = set[int]()

    def allocate(self) -> int:
        block = super().allocate()
        self._handed_out.add(block)
        return block

    def free(self, block: int) -> None:
        if block not in self._handed_out:
            super().free(block)  # refused
        self._held[block] = False
        self._free = np.append(self._free[: self._num_free], block)
        self._num_free += 1


class Implementation(Right):
    clause = "BLOCK-05"
    bug = "LMCache/LMCache#5005"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
