"""A cache of the first tokens and the newest ones."""

import numpy as np

from kvref.errors import NotTruncatable, PositionOutOfRange


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
        self.window, self.sinks, self.ring = window, sinks, window + rollback
        self.keys = np.zeros((sinks + self.ring, num_kv_heads, head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.clear()

    def clear(self):
        """Remove all tokens."""
        self.length = 0
        self.positions = np.full(len(self.keys), -1)  # which position each slot contains; -1 for none

    @property
    def stored_tokens(self):
        """The number of tokens for which the cache has keys and values."""
        return int((self.positions >= 0).sum())

    def slot(self, position):
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.ring

    def append(self, keys, values):
        """Store tokens after the last one. Both arrays: float32 [tokens, num_kv_heads, head_dim]."""
        for key, value in zip(keys, values, strict=True):
            slot = self.slot(self.length)
            self.keys[slot], self.values[slot], self.positions[slot] = key, value, self.length
            self.length += 1

    def read(self, positions):
        """Return the keys and values at these positions, in their order. Raises PositionOutOfRange."""
        for position in positions:
            if not self.is_stored(position):
                raise PositionOutOfRange(f"position {position} of {self.length}: not appended, or evicted")
        slots = [self.slot(position) for position in positions]
        return self.keys[slots], self.values[slots]

    def is_stored(self, position):
        return 0 <= position < self.length and self.positions[self.slot(position)] == position

    def truncate(self, length):
        """Keep the first `length` tokens. Raises PositionOutOfRange and NotTruncatable."""
        if not 0 <= length <= self.length:
            raise PositionOutOfRange(f"length {length}, but there are {self.length} tokens")
        if not all(self.is_stored(position) for position in self.seen(length) if position < length):
            raise NotTruncatable(f"a token that the query at {length} sees was evicted")
        self.positions[self.positions >= length] = -1
        self.length = length

    def seen(self, query):
        """Return the positions that a query sees: the sink tokens, and the last `window` tokens up to its own."""
        first = max(0, query - self.window + 1)
        return [*range(min(self.sinks, first)), *range(first, query + 1)]

    def step(self, query, keys, values, scale):
        """Append tokens, and return the attention of one query per token, [tokens, query heads, head_dim].

        query: float32 [tokens, query heads, head_dim]. Each query sees the tokens up to its own, within its window.
        """
        out = np.zeros(query.shape, np.float32)
        for i in range(len(keys)):
            self.append(keys[i : i + 1], values[i : i + 1])
            out[i] = attention(query[i], *self.read(self.seen(self.length - 1)), scale)
        return out
