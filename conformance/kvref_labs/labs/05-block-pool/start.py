"""A pool of blocks with reference counts."""

from kvref.errors import BlockNotAllocated, OutOfBlocks, PositionOutOfRange  # noqa: F401


class Pool:
    """Blocks are numbered from 0 to num_blocks - 1."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks

    @property
    def num_free(self):
        raise NotImplementedError

    @property
    def num_used(self):
        raise NotImplementedError

    @property
    def utilization(self):
        """The share of blocks that are not free: 0.0 to 1.0."""
        raise NotImplementedError

    def allocate(self):
        """Return a free block, which has one reference from now on. Raises OutOfBlocks."""
        raise NotImplementedError

    def allocate_many(self, count):
        """Return a list of `count` blocks. Raises PositionOutOfRange if count is negative, and OutOfBlocks."""
        raise NotImplementedError

    def share(self, block):
        """Add a reference. Raises BlockNotAllocated."""
        raise NotImplementedError

    def free(self, block):
        """Remove a reference. Raises BlockNotAllocated."""
        raise NotImplementedError

    def references(self, block):
        """Return the number of references of a block, 0 if it is free. Raises BlockNotAllocated if it does not exist."""
        raise NotImplementedError
