"""Freeing a block puts it on the free list without asking whether it is there already: two owners next time."""

import numpy as np

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def free(self, block: int) -> None:
        self._held[block] = False
        self._free = np.append(self._free[: self._num_free], block)
        self._num_free += 1


class Implementation(Right):
    clause = "BLOCK-05"
    bug = "LMCache/LMCache#5005"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
