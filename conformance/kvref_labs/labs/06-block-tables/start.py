"""A paged cache: sequences in blocks of one pool."""

import numpy as np

from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound  # noqa: F401


class Cache:
    """Blocks are numbered from 0 to num_blocks - 1, and layers from 0 to num_layers - 1.

    free: the blocks that no sequence has. keys, values: the memory, one row per slot.
    """

    def __init__(self, num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype):
        self.num_blocks, self.block_size, self.num_layers = num_blocks, block_size, num_layers
        self.free = list(reversed(range(num_blocks)))
        self.keys = np.zeros((num_blocks * block_size, num_kv_heads, head_dim), np.float32)
        self.values = np.zeros_like(self.keys)

    @property
    def num_free_blocks(self):
        return len(self.free)

    def create(self):
        """Return the id of a new sequence, an integer that was never used before."""
        raise NotImplementedError

    def drop(self, sequence):
        """Remove a sequence, and free its blocks."""
        raise NotImplementedError

    def ensure_capacity(self, sequence, num_tokens):
        """Allocate blocks until `num_tokens` tokens fit into every layer."""
        raise NotImplementedError

    def write(self, sequence, layer, start, keys, values):
        """Write tokens to one layer, at the positions from `start` on. Both arrays: [tokens, num_kv_heads, head_dim]."""
        raise NotImplementedError

    def gather(self, sequence, layer):
        """Return the keys and the values of all tokens of a layer, in the order of their positions."""
        raise NotImplementedError

    def length(self, sequence, layer):
        """Return the number of tokens in a layer."""
        raise NotImplementedError

    def block_table(self, sequence, layer):
        """Return the list of blocks of a layer, in the order of their tokens."""
        raise NotImplementedError

    def slot_mapping(self, sequence, layer, start, count):
        """Return the slots of `count` positions from `start` on, for which the sequence has blocks."""
        raise NotImplementedError
