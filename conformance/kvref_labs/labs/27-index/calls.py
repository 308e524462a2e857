"""A cache with index keys, of which every query attends to three tokens."""

import numpy as np

from kvref import SparseCache, SparseConfig
from kvref_labs.quiz import ask

cache = SparseCache(SparseConfig(num_blocks=8, num_kv_heads=1, head_dim=1, index_dim=1, top_k=3, block_size=2))


def append(sequence, *index_keys):
    """Append tokens with these index keys. Each value is the index key times 10."""
    keys = np.array(index_keys, np.float32)[:, None]
    cache.append(sequence, keys[..., None], 10 * keys[..., None], keys)


def select(sequence, queries=1, weight=1.0):
    """The choice of the queries at the last positions, with the index query 1 and one head of this weight."""
    weights = np.full((queries, 1), weight, np.float32)
    return cache.select(sequence, np.ones((queries, 1, 1), np.float32), weights, causal=True)


first = cache.create()
append(first, 4, 9, 1, 7, 6)
ask(1, select(first)[0])
ask(2, select(first, queries=5)[1])
ask(3, select(first, queries=5)[3])
ask(4, select(first, weight=-1.0)[0])
one = np.ones((1, 1, 1), np.float32)
ask(5, round(float(cache.attend(first, 0 * one, one, one[0])[0, 0, 0])))

second = cache.fork(first)
cache.truncate(second, 4)
append(second, 8, 2)
ask(6, select(second)[0])
ask(7, select(first)[0])

handle = cache.offload(second)
cache.truncate(second, 0)
append(second, 5, 5)
ask(8, select(cache.restore(handle))[0])
ask(9, select(second)[0])
