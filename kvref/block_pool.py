"""The block pool of a paged cache: which blocks are free, and how many references each block has, as in PagedAttention.

A block is `block_size` consecutive slots of the key store and of the value store. The pool knows neither: it manages numbers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvref.errors import BlockNotAllocated, OutOfBlocks, PositionOutOfRange, in_range, integer, whole

MOST_BLOCKS = 2**31 - 1  # block ids are int32, as kernels expect them

Blocks = Sequence[int] | NDArray[np.int32]


class BlockPool:
    """The allocator of `num_blocks` blocks with reference counts (chapters BLOCK and SHARE).

    Block ids are the integers in `[0, num_blocks)`. A block without references is free. In a paged cache the number of references
    of a block is the number of block tables that list it (LAW-03). A pool can have 0 blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks` free blocks. Raises ConfigError unless `num_blocks` is an integer in `[0, 2^31)`."""
        self.num_blocks = whole("num_blocks", num_blocks, minimum=0, maximum=MOST_BLOCKS)
        self._free = np.arange(self.num_blocks, dtype=np.int32)[::-1].copy()  # a stack; its first _num_free entries are valid
        self._num_free = len(self._free)
        self._references: NDArray[np.int32] = np.zeros(self.num_blocks + 1, np.int32)  # the last is for NO_BLOCK, always 0

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """The number of allocated blocks. A shared block counts once."""
        return self.num_blocks - self.num_free

    @property
    def utilization(self) -> float:
        """num_used / num_blocks; 0.0 for a pool of 0 blocks (BLOCK-06)."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    def allocate(self) -> int:
        """Allocate a free block, with one reference, and return its id (BLOCK-02). Raises OutOfBlocks if no block is free."""
        return int(self.allocate_many(1)[0])

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        """Allocate `count` free blocks, each with one reference, and return their ids, int32 [count] (BLOCK-07).

        If it raises, no block is allocated. Raises OutOfBlocks if fewer blocks are free, PositionOutOfRange if `count` is
        negative.
        """
        count = in_range(count, None, PositionOutOfRange, "count")
        if count > self.num_free:
            raise OutOfBlocks(f"out of blocks: {count} needed, {self.num_free} of {self.num_blocks} free")
        taken = self._pop_free_blocks(count)
        self._references[taken] = 1
        return taken

    def share(self, block: int) -> None:
        """Add one reference to an allocated block. Raises BlockNotAllocated if the block is free or does not exist (SHARE-02)."""
        self.share_many([self._check_allocated("share", block)])

    def share_many(self, blocks: Blocks) -> None:
        """Add one reference to each of `blocks`, which must be different and allocated: this is not checked."""
        self._references[blocks] += 1

    def free(self, block: int) -> None:
        """Remove one reference from a block. Without references the block is free (SHARE-01).

        Raises BlockNotAllocated if the block is free already or does not exist: a block that is freed twice would be allocated to
        two owners (BLOCK-05).
        """
        self.free_many([self._check_allocated("free", block)])

    def free_many(self, blocks: Blocks) -> None:
        """Remove one reference from each of `blocks`, which must be different and allocated: this is not checked."""
        numbers = np.asarray(blocks, np.int32)
        self._references[numbers] -= 1
        self._return_blocks(numbers[self._references[numbers] == 0])

    def references(self, block: int) -> int:
        """Return the number of references to a block, 0 if it is free. Raises BlockNotAllocated if the block does not exist."""
        number = integer(block)
        if number is None or not 0 <= number < self.num_blocks:
            raise BlockNotAllocated(f"references: expected a block in [0, {self.num_blocks}), got {block!r}")
        return int(self._references[number])

    def shared(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return which of `blocks` have more than one reference: bool, in the shape of `blocks`. NO_BLOCK has none."""
        return np.asarray(self._references[blocks] > 1)

    def _check_allocated(self, operation: str, block: int) -> int:
        """`block` as a Python int. Raises BlockNotAllocated unless it is allocated."""
        number = integer(block)
        if number is None or not 0 <= number < self.num_blocks or not self._references[number]:
            raise BlockNotAllocated(f"{operation}: block {block!r} is not allocated")
        return number

    def _pop_free_blocks(self, count: int) -> NDArray[np.int32]:
        """Remove `count` blocks from the free list and return them. There must be enough."""
        left = self._num_free - count
        taken = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        return taken

    def _return_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Return blocks without references to the free list."""
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)
