"""A cache of the first tokens and the newest ones."""

import numpy as np

from kvref.errors import NotTruncatable, PositionOutOfRange  # noqa: F401


def attention(query, keys, values, scale):
    """Return attention of one query [query heads, head_dim] over tokens [tokens, key-value heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (np.repeat(part, group, axis=1).astype(np.float64) for part in (keys, values))
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), keys) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values).astype(np.float32)


class Cache:
    """length: the number of tokens that were appended and not removed, evicted ones included."""

    def __init__(self, num_kv_heads, head_dim, window, sinks, chunk, rollback, dtype):
        self.length = 0

    def clear(self):
        """Remove all tokens."""
        raise NotImplementedError

    @property
    def stored_tokens(self):
        """The number of tokens for which the cache has keys and values."""
        raise NotImplementedError

    def append(self, keys, values):
        """Store tokens after the last one. Both arrays: float32 [tokens, num_kv_heads, head_dim]."""
        raise NotImplementedError

    def read(self, positions):
        """Return the keys and values at these positions, in their order. Raises PositionOutOfRange."""
        raise NotImplementedError

    def truncate(self, length):
        """Keep the first `length` tokens. Raises PositionOutOfRange and NotTruncatable."""
        raise NotImplementedError

    # The last part. Uncomment it when the clauses before WIN-01 hold.
    #
    # def step(self, query, keys, values, scale):
    #     """Append tokens, and return the attention of one query per token, [tokens, query heads, head_dim].
    #
    #     query: float32 [tokens, query heads, head_dim]. Each query sees the tokens up to its own, within its window.
    #     """
    #     raise NotImplementedError
