"""The cache of multi-head latent attention."""

import numpy as np

from kvref.errors import CapacityExceeded, PositionOutOfRange


class Cache:
    """length: the number of tokens."""

    def __init__(self, rank, rope_dim, max_tokens, dtype):
        self.rank, self.max_tokens = rank, max_tokens
        self.rows = np.zeros((max_tokens, rank + rope_dim), np.float32)
        self.length = 0

    @property
    def num_bytes(self):
        """The bytes of the stored rows."""
        return self.read().nbytes

    def append(self, latent, rope):
        """Store tokens after the last one. latent: float32 [tokens, rank]. rope: float32 [tokens, rope_dim]."""
        stop = self.length + len(latent)
        if stop > self.max_tokens:
            raise CapacityExceeded(f"{stop} tokens, but max_tokens is {self.max_tokens}")
        self.rows[self.length : stop] = np.concatenate([latent, rope], axis=1)
        self.length = stop

    def read(self):
        """Return the rows of all tokens, [length, rank + rope_dim]."""
        return self.rows[: self.length]

    def truncate(self, length):
        """Keep the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise PositionOutOfRange(f"length {length}, but there are {self.length} tokens")
        self.length = length

    def clear(self):
        self.length = 0

    def attend(self, query, up_keys, up_values, scale, causal):
        """Return attention over the tokens, as float32 [queries, heads, value_dim].

        query: [queries, heads, nope_dim + rope_dim]. up_keys: [heads, nope_dim, rank]. up_values: [heads, value_dim, rank].
        causal: whether the queries are those of the last tokens, and each sees the tokens up to its own; otherwise each sees all.
        """
        num_queries, num_heads, _ = query.shape
        rows, nope_dim = self.read().astype(np.float64), up_keys.shape[1]
        out = np.zeros((num_queries, num_heads, up_values.shape[1]), np.float32)
        for i in range(num_queries):
            seen = rows[: self.length - num_queries + i + 1 if causal else self.length]
            if len(seen) == 0:
                continue
            for head in range(num_heads):
                nope, rope = query[i, head, :nope_dim].astype(np.float64), query[i, head, nope_dim:]
                absorbed = np.concatenate([nope @ up_keys[head], rope])
                scores = seen @ absorbed * scale
                weights = np.exp(scores - scores.max())
                mean = weights @ seen[:, : self.rank] / weights.sum()
                out[i, head] = up_values[head] @ mean
        return out
