"""A free block can be shared: it gets a reference and stays on the free list."""

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def share(self, block: int) -> None:
        if 0 <= block < self.num_blocks:
            self.share_many([block])
        else:
            super().share(block)  # raises


class Implementation(Right):
    clause = "SHARE-02"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
