"""A compressed cache with groups of three tokens, a window of three, and one token of rollback."""

import numpy as np

from kvref import CompressedCache, CompressedConfig
from kvref.errors import KVRefError
from kvref_labs.quiz import ask

sizes = {"num_blocks": 1, "head_dim": 1, "rope_dim": 0, "window": 3, "ratio": 3, "max_tokens": 8, "rollback": 1}
cache = CompressedCache(CompressedConfig(**sizes))


def tokens(*numbers):
    """Tokens whose contribution is 10 times the latent. All gates are 0, so that a row is the mean of its contributions."""
    latents = np.array(numbers, np.float32)[:, None]
    return latents, 10 * latents, 0 * latents


def rows():
    return cache.read_rows(sequence).ravel()


def state():
    """The contributions in the compressor state."""
    return cache.read_state(sequence)[0].ravel()


def error_of(call, *args):
    """The name of the error that a call raises, or "none"."""
    try:
        call(*args)
    except KVRefError as raised:
        return type(raised).__name__
    return "none"


sequence = cache.create()
cache.append(sequence, *tokens(1, 2))
ask(1, state())
cache.append(sequence, *tokens(3, 4))
ask(2, rows())
ask(3, state())
ask(4, cache.read_window(sequence).ravel())
queries = np.zeros((2, 1, 1), np.float32)
ask(5, cache.step(sequence, queries, *tokens(5, 6), 1.0).ravel())
cache.truncate(sequence, 5)
ask(6, rows())
ask(7, state())
ask(8, error_of(cache.truncate, sequence, 2))
handle = cache.offload(sequence)
ask(9, error_of(cache.restore, handle))
cache.drop(sequence)
sequence = cache.create()
cache.append(sequence, *tokens(7))
ask(10, rows())
cache.drop(sequence)
sequence = cache.restore(handle)
cache.append(sequence, *tokens(9))
ask(11, rows())
