"""A sequence with a speculation tree, of which one path is accepted."""

import numpy as np

from kvref import TreeCache, TreeConfig
from kvref.errors import KVRefError
from kvref_labs.quiz import ask

cache = TreeCache(TreeConfig(num_blocks=4, num_kv_heads=1, head_dim=1, block_size=2))


def rows(*values):
    tokens = np.array(values, np.float32)[:, None, None]
    return tokens, tokens


def error(call, *arguments):
    """The name of the error that a call raises, or "none"."""
    try:
        call(*arguments)
    except KVRefError as raised:
        return type(raised).__name__
    return "none"


sequence = cache.create()
cache.append(sequence, *rows(1, 2))
ask(1, cache.draft(sequence, *rows(3, 4), [-1, -1]))
ask(2, cache.draft(sequence, *rows(5, 6, 7), [1, 1, 0]))
ask(3, cache.positions(sequence))
ask(4, cache.ancestors(sequence, 3))
ask(5, cache.length(sequence))
ask(6, cache.num_free_blocks)
# With a query of zeros, the output is the mean of the values that the query sees.
ask(7, cache.attend(sequence, [4], np.zeros((1, 1, 1), np.float32), 1.0)[0, 0, 0])
ask(8, error(cache.append, sequence, *rows(8)))
cache.accept(sequence, 3)
ask(9, cache.read(sequence)[0].ravel().astype(int))
ask(10, cache.num_free_blocks)
ask(11, cache.draft(sequence, *rows(9), [-1]))
