"""A cache with cross-attention. 0 is padding."""

import numpy as np

from kvref import CrossCache, CrossConfig
from kvref.errors import KVRefError
from kvref_labs.quiz import ask

cache = CrossCache(CrossConfig(batch_size=3, num_kv_heads=1, head_dim=1, max_tokens=4, max_source=4))


def batch(*rows):
    """Keys and values with these columns."""
    entries = np.array(rows, np.float32)[:, None, :, None]
    return entries, entries


def source(row):
    """The keys of a row's source."""
    return cache.read_source(row)[0].ravel().astype(int)


def attend(row):
    """The output of a row for a query of zeros."""
    return cache.attend_source(np.zeros((cache.batch_size, 1, 1, 1), np.float32), 1.0)[row].ravel()


def error_of(call, *args):
    """The name of the error that a call raises, or "none"."""
    try:
        call(*args)
    except KVRefError as raised:
        return type(raised).__name__
    return "none"


cache.write_source([1, 0], *batch([1, 2, 6], [8, 0, 0]), [3, 1])
ask(1, source(1))
ask(2, error_of(attend, 0))
cache.write_source([2], *batch([0]), [0])
ask(3, attend(1))
ask(4, attend(2))
cache.append(*batch([10, 11], [20, 21], [30, 31]))
cache.trim([2, 1, 0])
ask(5, source(1))
ask(6, [cache.length(row) for row in range(3)])
ask(7, error_of(cache.write_source, [0], *batch([9])))
cache.filter([2, 1, 1])
ask(8, [cache.source_length(row) for row in range(3)])
cache.clear(1)
cache.write_source([1], *batch([5, 0]), [1])
ask(9, source(1))
ask(10, [cache.length(row) for row in range(3)])
