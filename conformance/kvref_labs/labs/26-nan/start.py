"""Attention in tiles."""

import numpy as np

TILE = 4  # tokens


class Attention:
    def attention(self, query, keys, values, *, scale, causal, length):
        """Return attention over the first `length` tokens, as float32 [queries, query heads, value_dim]."""
        out = np.zeros((*query.shape[:2], values.shape[2]), np.float32)
        group = query.shape[1] // keys.shape[1]
        for i in range(len(query)):
            seen = length - len(query) + i + 1 if causal else length
            for head in range(query.shape[1]):
                part = keys[:, head // group], values[:, head // group]
                out[i, head] = attend_in_tiles(query[i, head], *part, scale, seen)
        return out


def attend_in_tiles(query, keys, values, scale, seen):
    """Return the attention of one query [dim] over the first `seen` of the keys and values [tokens, dim].

    largest: the largest score so far. total: the sum of exp(score - largest). mean: the sum of the values with these weights.
    """
    largest, total, mean = -np.inf, 0.0, np.zeros(values.shape[1])
    for start in range(0, max(seen, 0), TILE):
        tile = slice(start, start + TILE)
        mask = np.arange(start, start + len(keys[tile])) < seen
        scores = np.where(mask, keys[tile].astype(np.float64) @ query.astype(np.float64) * scale, -np.inf)
        new_largest = max(largest, scores.max())
        weights = np.exp(scores - new_largest)
        shrink = np.exp(largest - new_largest)
        total = total * shrink + weights.sum()
        mean = mean * shrink + weights @ values[tile].astype(np.float64)
        largest = new_largest
    return mean / total if total else mean
