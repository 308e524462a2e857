"""A contiguous cache: one buffer that grows."""

import numpy as np

from kvref.errors import CapacityExceeded


class Cache:
    """Keys and values of a batch of sequences, which grow together.

    seq_len: the number of tokens. capacity: the number of tokens for which there is memory.
    """

    def __init__(self, batch_size, num_kv_heads, head_dim, initial_capacity, max_seq_len, dtype):
        self.max_seq_len = max_seq_len
        self.seq_len = 0
        self.capacity = min(initial_capacity, max_seq_len)
        self.keys, self.values = (np.zeros((batch_size, num_kv_heads, self.capacity, head_dim), np.float32) for _ in range(2))

    def append(self, keys, values):
        """Store tokens after the last one. Both arrays: float32 [batch_size, num_kv_heads, tokens, head_dim]."""
        end = self.seq_len + keys.shape[2]
        if end > self.max_seq_len:
            raise CapacityExceeded(f"{end} tokens, but max_seq_len is {self.max_seq_len}")
        if end > self.capacity:
            self.grow(end)
        self.keys[:, :, self.seq_len : end] = keys
        self.values[:, :, self.seq_len : end] = values
        self.seq_len = end

    def grow(self, needed):
        capacity = self.capacity
        while capacity < needed:
            capacity = min(max(1, 2 * capacity), self.max_seq_len)
        more = ((0, 0), (0, 0), (0, capacity - self.capacity), (0, 0))
        self.keys, self.values = np.pad(self.keys, more), np.pad(self.values, more)
        self.capacity = capacity

    def read(self):
        """Return the keys and the values of all tokens, in the shape that `append` accepts."""
        return self.keys[:, :, : self.seq_len], self.values[:, :, : self.seq_len]

    def reset(self):
        """Remove all tokens. The memory stays allocated."""
        self.seq_len = 0
