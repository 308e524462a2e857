"""Allocating a negative number of blocks returns none and increases the free count.

The pool reports more free blocks than it has.
"""

from typing import Any

import kvref
from kvref.errors import OutOfBlocks
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def allocate_many(self, count: int) -> Any:
        if count > self.num_free:
            raise OutOfBlocks(f"out of blocks: {count} needed, {self.num_free} of {self.num_blocks} free")
        if count > 0:
            return super().allocate_many(count)
        self._num_free -= count
        return []


class Implementation(Right):
    clause = "LAW-19"
    also = ("LAW-11",)
    bug = "vllm-project/vllm#52707"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
