"""Prompts that a prefix cache serves."""

import numpy as np

from kvref import PagedConfig, PrefixCache
from kvref_labs.quiz import ask

cache = PrefixCache(PagedConfig(num_blocks=5, block_size=2, num_layers=1, num_kv_heads=1, head_dim=1))


def serve(prompt, salt=""):
    """Compute what is not cached, and commit the whole prompt."""
    sequence = cache.begin(prompt, salt)
    hit = cache.length(sequence, 0)
    rows = np.ones((len(prompt) - hit, 1, 1), np.float32)
    cache.write(sequence, 0, hit, rows, rows)
    cache.commit(sequence, prompt)
    return sequence


a = serve([1, 2, 3, 4, 5])
ask(1, cache.num_free_blocks)
ask(2, cache.match([1, 2, 3, 4, 5]))
ask(3, cache.match([1, 2, 3, 4]))
ask(4, cache.match([1, 2, 9, 4, 5]))
ask(5, cache.match([9, 2, 3, 4, 5]))
ask(6, cache.match([1, 2, 3, 4, 5], "another tenant"))

b = serve([1, 2, 3, 4, 6, 7])
ask(7, cache.num_free_blocks)

cache.drop(a)
cache.drop(b)
ask(8, cache.num_free_blocks)

# Three blocks for tokens that are not committed. Two of the five blocks are not cached.
other = cache.create()
cache.ensure_capacity(other, 6)
ask(9, cache.match([1, 2, 3, 4, 6, 7, 8]))

# One block more.
cache.ensure_capacity(other, 8)
ask(10, cache.match([1, 2, 3, 4, 6, 7, 8]))
