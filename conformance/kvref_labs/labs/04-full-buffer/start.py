"""A contiguous cache whose tokens can be truncated."""

import numpy as np

from kvref.errors import CapacityExceeded, PositionOutOfRange


class Cache:
    def __init__(self, batch_size, num_kv_heads, head_dim, initial_capacity, max_seq_len, dtype):
        self.max_seq_len = max_seq_len
        self.seq_len = 0
        shape = (batch_size, num_kv_heads, min(initial_capacity, max_seq_len), head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def capacity(self):
        return self.keys.shape[2]

    def append(self, keys, values):
        start, stop = self.seq_len, self.seq_len + keys.shape[2]
        self.seq_len = stop
        self.reserve(stop)
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values

    def reserve(self, needed):
        """Make room for `needed` tokens."""
        if needed > self.max_seq_len:
            raise CapacityExceeded(f"{needed} tokens, but max_seq_len is {self.max_seq_len}")
        if needed <= self.capacity:
            return
        capacity = max(1, self.capacity)
        while capacity < needed:
            capacity *= 2
        self.keys = self.resized(self.keys, min(capacity, self.max_seq_len))
        self.values = self.resized(self.values, min(capacity, self.max_seq_len))

    def resized(self, buffer, capacity):
        larger = np.zeros((*buffer.shape[:2], capacity, buffer.shape[3]), np.float32)
        larger[:, :, : buffer.shape[2]] = buffer
        return larger

    def read(self):
        return self.keys[:, :, : self.seq_len], self.values[:, :, : self.seq_len]

    def truncate(self, length):
        """Keep the first `length` tokens."""
        if not 0 <= length <= self.seq_len:
            raise PositionOutOfRange(f"length: {length}, but there are {self.seq_len} tokens")
        self.seq_len = length

    def reset(self):
        self.seq_len = 0
