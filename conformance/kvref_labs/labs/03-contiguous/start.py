"""A contiguous cache: one buffer that grows."""

import numpy as np  # noqa: F401

from kvref.errors import CapacityExceeded  # noqa: F401


class Cache:
    """Keys and values of a batch of sequences, which grow together.

    seq_len: the number of tokens. capacity: the number of tokens for which there is memory.
    """

    def __init__(self, batch_size, num_kv_heads, head_dim, initial_capacity, max_seq_len, dtype):
        self.seq_len = 0
        self.capacity = min(initial_capacity, max_seq_len)
        # The buffers are missing.

    def append(self, keys, values):
        """Store tokens after the last one. Both arrays: float32 [batch_size, num_kv_heads, tokens, head_dim]."""
        raise NotImplementedError

    def read(self):
        """Return the keys and the values of all tokens, in the shape that `append` accepts."""
        raise NotImplementedError

    def reset(self):
        """Remove all tokens. The memory stays allocated."""
        raise NotImplementedError
