"""A reference count below zero is set back to zero, so that freeing a block that is not allocated raises no error."""

from contextlib import suppress

import kvref
from kvref.errors import BlockNotAllocated
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def free(self, block: int) -> None:
        with suppress(BlockNotAllocated):
            super().free(block)


class Implementation(Right):
    clause = "BLOCK-05"
    also = ("SHARE-01",)
    bug = "LMCache/LMCache#1365"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
