"""`free` of a shared block removes the references of all its owners, not only the caller's."""

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    def free(self, block: int) -> None:
        for _ in range(max(1, self.references(block) if 0 <= block < self.num_blocks else 1)):
            super().free(block)


class Implementation(Right):
    clause = "SHARE-01"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
