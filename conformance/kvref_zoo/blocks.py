"""Wrong block pools."""

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.errors import BlockNotAllocated, OutOfBlocks
from kvref_zoo.mutant import mutant


@mutant("BLOCK-03", also="SHARE-01")
class BlocksAllocateReturnsMinusOne(kvref.BlockPool):
    """`allocate` of an exhausted pool returns -1 instead of raising OutOfBlocks, and the caller uses -1 as the id of a block."""

    def allocate(self) -> int:
        return super().allocate() if self.num_free else -1


@mutant("SHARE-01")
class BlocksFreeDropsAllReferences(kvref.BlockPool):
    """`free` of a shared block removes the references of all its owners, not only the caller's."""

    def free(self, block: int) -> None:
        for _ in range(max(1, self.references(block) if 0 <= block < self.num_blocks else 1)):
            super().free(block)


@mutant("BLOCK-05", also="SHARE-01", seen_in="LMCache/LMCache#1365")
class BlocksFreeIgnoresFreeBlocks(kvref.BlockPool):
    """A reference count below zero is set back to zero, so that freeing a block that is not allocated raises no error."""

    def free(self, block: int) -> None:
        with suppress(BlockNotAllocated):
            super().free(block)


@mutant("BLOCK-05", also="SHARE-01", seen_in="LMCache/LMCache#5005")
class BlocksFreedTwice(kvref.BlockPool):
    """A block that was allocated once can be freed any number of times.

    It is then on the free list twice, and gets two owners.
    """

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


@mutant("LAW-19", also="LAW-11", seen_in="vllm-project/vllm#52707")
class BlocksNegativeCountFrees(kvref.BlockPool):
    """Allocating a negative number of blocks returns none and increases the free count.

    The pool reports more free blocks than it has.
    """

    def allocate_many(self, count: int) -> Any:
        if count > self.num_free:
            raise OutOfBlocks(f"out of blocks: {count} needed, {self.num_free} of {self.num_blocks} free")
        if count > 0:
            return super().allocate_many(count)
        self._num_free -= count
        return []


@mutant("LAW-03", also="BLOCK-05 BLOCK-07 LAW-19 SHARE-01 SHARE-02", seen_in="xLLM-AI/xllm#829")
class BlocksNumUsedNeverDecreases(kvref.BlockPool):
    """`num_used` never decreases. After some time the pool reports that it is full, and the scheduler admits no more requests."""

    _ever = 0

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        blocks = super().allocate_many(count)
        self._ever += len(blocks)
        return blocks

    @property
    def num_used(self) -> int:
        return self._ever


@mutant("SHARE-02")
class BlocksShareAcceptsFreeBlocks(kvref.BlockPool):
    """A free block can be shared: it gets a reference and stays on the free list."""

    def share(self, block: int) -> None:
        if 0 <= block < self.num_blocks:
            self.share_many([block])
        else:
            super().share(block)  # raises
