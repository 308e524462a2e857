"""Attention of some queries over keys and values."""

import numpy as np  # noqa: F401


class Attention:
    def attention(self, query, keys, values, *, scale, causal, length):
        """Return attention over the first `length` tokens, as float32 [queries, query heads, value_dim].

        query: [queries, query heads, head_dim]. keys: [tokens, key-value heads, head_dim]. values: [tokens, key-value heads,
        value_dim]. There can be more than `length` tokens; the rest is not valid. scale: the factor of the scores.
        """
        raise NotImplementedError
