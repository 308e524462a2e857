"""A block that nobody holds can be shared: it has a reference, and is on the free list all the same."""

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def share(self, block: int) -> None:
        if 0 <= block < self.num_blocks:
            self.share_many([block])
        else:
            super().share(block)  # refused


class Implementation(Right):
    clause = "SHARE-02"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
