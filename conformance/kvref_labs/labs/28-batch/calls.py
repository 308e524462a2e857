"""A batch whose rows have different lengths. 0 is padding."""

import numpy as np

from kvref import RaggedCache, RaggedConfig
from kvref.errors import KVRefError
from kvref_labs.quiz import ask

cache = RaggedCache(RaggedConfig(batch_size=3, num_kv_heads=1, head_dim=1, max_tokens=5))


def batch(*rows):
    """Keys and values with these columns."""
    tokens = np.array(rows, np.float32)[:, None, :, None]
    return tokens, tokens


def read(row):
    """The keys of a row."""
    return cache.read(row)[0].ravel().astype(int)


def lengths():
    return [cache.length(row) for row in range(cache.batch_size)]


cache.append(*batch([1, 0, 0], [2, 3, 0], [4, 5, 6]), counts=[1, 2, 3])
ask(1, lengths())
cache.append(*batch([0, 7], [8, 9], [0, 0]), counts=[1, 2, 0], left=True)
ask(2, read(0))
ask(3, read(2))
ask(4, lengths())

query = np.zeros((3, 1, 2, 1), np.float32)
ask(5, cache.attend(query, 1.0, causal=True)[0, 0, :, 0])

cache.filter([2, 0])
ask(6, read(1))
cache.extend(*batch([11, 12], [13, 0]), counts=[2, 1])
ask(7, lengths())
cache.trim([1, 0, 2, 0])
ask(8, lengths())
try:
    cache.append(*batch([0] * 6, [0] * 6, [0] * 6, [0] * 6), counts=[1, 0, 5, 5])
    error = "none"
except KVRefError as raised:
    error = type(raised).__name__
ask(9, error)
ask(10, lengths())
