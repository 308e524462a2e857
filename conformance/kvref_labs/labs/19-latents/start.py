"""The cache of multi-head latent attention."""

import numpy as np  # noqa: F401

from kvref.errors import CapacityExceeded, PositionOutOfRange  # noqa: F401


class Cache:
    """length: the number of tokens."""

    def __init__(self, rank, rope_dim, max_tokens, dtype):
        self.length = 0

    @property
    def num_bytes(self):
        """The bytes of the stored rows."""
        raise NotImplementedError

    def append(self, latent, rope):
        """Store tokens after the last one. latent: float32 [tokens, rank]. rope: float32 [tokens, rope_dim]."""
        raise NotImplementedError

    def read(self):
        """Return the rows of all tokens, [length, rank + rope_dim]."""
        raise NotImplementedError

    def truncate(self, length):
        """Keep the first `length` tokens."""
        raise NotImplementedError

    def clear(self):
        raise NotImplementedError

    def attend(self, query, up_keys, up_values, scale, causal):
        """Return attention over the tokens, as float32 [queries, heads, value_dim].

        query: [queries, heads, nope_dim + rope_dim]. up_keys: [heads, nope_dim, rank]. up_values: [heads, value_dim, rank].
        causal: whether the queries are those of the last tokens, and each sees the tokens up to its own; otherwise each sees all.
        """
        raise NotImplementedError
