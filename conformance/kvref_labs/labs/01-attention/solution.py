"""Attention of some queries over keys and values."""

import numpy as np


class Attention:
    def attention(self, query, keys, values, *, scale, causal, length):
        """Return attention over the first `length` tokens, as float32 [queries, query heads, value_dim].

        query: [queries, query heads, head_dim]. keys: [tokens, key-value heads, head_dim]. values: [tokens, key-value heads,
        value_dim]. There can be more than `length` tokens; the rest is not valid. scale: the factor of the scores.
        """
        num_queries, num_heads, _ = query.shape
        out = np.zeros((num_queries, num_heads, values.shape[2]), np.float32)
        group = num_heads // keys.shape[1]
        for i in range(num_queries):
            seen = length - num_queries + i + 1 if causal else length
            if seen <= 0:
                continue
            for head in range(num_heads):
                own_keys, own_values = (part[:seen, head // group].astype(np.float64) for part in (keys, values))
                scores = own_keys @ query[i, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[i, head] = weights @ own_values / weights.sum()
        return out
