"""Views of queries, and the contents of a ring."""

import numpy as np

from kvref import Sight, WindowedCache, WindowedConfig
from kvref.errors import NotTruncatable
from kvref_labs.quiz import ask


def seen(query, **sizes):
    """The positions that the query at this position sees."""
    return [token for token in range(20) if Sight(**sizes).sees(query, token)]


ask(1, seen(6, window=3))
ask(2, seen(1, window=3))
ask(3, len(seen(15, window=8)))
ask(4, seen(9, window=2, sinks=3))
ask(5, seen(3, window=2, sinks=3))
ask(6, seen(11, chunk=4))
ask(7, seen(12, chunk=4))

cache = WindowedCache(WindowedConfig(num_kv_heads=1, head_dim=1, window=4, sinks=1, rollback=2))
rows = np.zeros((1, 1, 1), np.float32)
for _ in range(100):
    cache.append(rows, rows)
ask(8, cache.length)


def can_truncate(length):
    try:
        cache.truncate(length)
    except NotTruncatable:
        return False
    return True


# The ring has window + rollback slots.
ask(9, can_truncate(90))
ask(10, can_truncate(98))
