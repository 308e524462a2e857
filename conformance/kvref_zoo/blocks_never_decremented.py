"""The count of blocks in use only ever grows: the pool reports itself full, and the scheduler admits nobody."""

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BlockPool):
    _ever = 0

    def allocate(self) -> int:
        block = super().allocate()
        self._ever += 1
        return block

    @property
    def num_used(self) -> int:
        return self._ever


class Implementation(Right):
    clause = "LAW-03"
    also = ("BLOCK-05",)
    bug = "xLLM-AI/xllm#829"

    def blocks(self, num_blocks: int) -> Pool:
        return Pool(num_blocks)
