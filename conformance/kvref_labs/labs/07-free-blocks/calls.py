"""Calls of a paged cache."""

import numpy as np

from kvref import PagedCache, PagedConfig
from kvref_labs.quiz import ask

cache = PagedCache(PagedConfig(num_blocks=12, block_size=4, num_layers=2, num_kv_heads=1, head_dim=1))


def tokens(count):
    return np.ones((count, 1, 1), np.float32)


a = cache.create()
ask(1, cache.num_free_blocks)

for layer in (0, 1):
    cache.write(a, layer, 0, tokens(5), tokens(5))
ask(2, len(cache.block_table(a, 0)))
ask(3, cache.num_free_blocks)

# Three more tokens in layer 0 alone.
cache.write(a, 0, 5, tokens(3), tokens(3))
ask(4, cache.num_free_blocks)
ask(5, [cache.length(a, 0), cache.length(a, 1)])

# One more token in layer 0. Blocks are allocated in every layer.
cache.write(a, 0, 8, tokens(1), tokens(1))
ask(6, cache.num_free_blocks)

# A fork shares all blocks. Then the child writes one token to layer 0, into the partly filled last block.
child = cache.fork(a)
ask(7, cache.num_free_blocks)
cache.write(child, 0, 9, tokens(1), tokens(1))
ask(8, cache.num_free_blocks)

cache.drop(a)
ask(9, cache.num_free_blocks)
cache.drop(child)
ask(10, cache.utilization)
