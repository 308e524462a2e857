"""`allocate` of an exhausted pool returns -1 instead of raising OutOfBlocks, and the caller uses -1 as the id of a block."""

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def allocate(self) -> int:
        return super().allocate() if self.num_free else -1


class Implementation(Right):
    clause = "BLOCK-03"
    also = ("SHARE-01",)

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
