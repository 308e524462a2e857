"""A pool of blocks with reference counts."""

from kvref.errors import BlockNotAllocated, OutOfBlocks, PositionOutOfRange


class Pool:
    """Blocks are numbered from 0 to num_blocks - 1."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        self.free_list = list(reversed(range(num_blocks)))

    @property
    def num_free(self):
        return len(self.free_list)

    @property
    def num_used(self):
        return self.num_blocks - self.num_free

    @property
    def utilization(self):
        """The share of blocks that are not free: 0.0 to 1.0."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    def allocate(self):
        """Return a free block, which has one reference from now on. Raises OutOfBlocks."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count):
        """Return a list of `count` blocks. Raises PositionOutOfRange if count is negative, and OutOfBlocks."""
        if count < 0:
            raise PositionOutOfRange(f"count: {count}")
        if count > self.num_free:
            raise OutOfBlocks(f"{count} needed, {self.num_free} free")
        blocks = [self.free_list.pop() for _ in range(count)]
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def share(self, block):
        """Add a reference. Raises BlockNotAllocated."""
        self.require_allocated(block)
        self.counts[block] += 1

    def free(self, block):
        """Remove a reference. Raises BlockNotAllocated."""
        self.require_allocated(block)
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.free_list.append(block)

    def references(self, block):
        """Return the number of references of a block, 0 if it is free. Raises BlockNotAllocated if it does not exist."""
        if not 0 <= block < self.num_blocks:
            raise BlockNotAllocated(f"there is no block {block}")
        return self.counts[block]

    def require_allocated(self, block):
        if self.references(block) == 0:
            raise BlockNotAllocated(f"block {block} is free")
