"""A cache in which each head keeps the tokens with the largest scores."""

import numpy as np

from kvref.errors import CapacityExceeded, HeadOutOfRange, NotTruncatable, PositionOutOfRange


class Cache:
    """length: the position of the next token. heads: for each head, its stored tokens as positions, keys and values."""

    def __init__(self, num_kv_heads, head_dim, max_tokens):
        self.head_dim, self.max_tokens, self.num_kv_heads = head_dim, max_tokens, num_kv_heads
        self.clear()

    def clear(self):
        self.length = 0
        empty = np.zeros((0, self.head_dim), np.float32)
        self.heads = [(np.zeros(0, int), empty, empty) for _ in range(self.num_kv_heads)]

    @property
    def stored_tokens(self):
        return len(self.heads[0][0])

    def append(self, keys, values):
        """Store tokens in every head. Both arrays: float32 [tokens, num_kv_heads, head_dim]."""
        if self.stored_tokens + len(keys) > self.max_tokens:
            raise CapacityExceeded(f"{self.stored_tokens + len(keys)} tokens, but max_tokens is {self.max_tokens}")
        new = np.arange(self.length, self.length + len(keys))
        self.heads = [
            tuple(np.concatenate(pair) for pair in zip(stored, (new, keys[:, head], values[:, head]), strict=True))
            for head, stored in enumerate(self.heads)
        ]
        self.length += len(keys)

    def prune(self, scores, keep, sinks=0, recent=0):
        """Keep `keep` tokens of each head. scores: float32 [num_kv_heads, stored_tokens]."""
        if keep < 1 or sinks < 0 or recent < 0 or keep < sinks + recent:
            raise PositionOutOfRange(f"keep {keep}, sinks {sinks}, recent {recent}")
        count = self.stored_tokens
        if count <= keep:
            return
        for head, own in enumerate(scores):
            middle = np.arange(sinks, count - recent)
            best = middle[np.argsort(-own[middle], kind="stable")][: keep - sinks - recent]
            rows = np.concatenate([np.arange(sinks), np.sort(best), np.arange(count - recent, count)]).astype(int)
            self.heads[head] = tuple(part[rows] for part in self.heads[head])

    def read(self):
        """Return the keys and values of the stored tokens, [stored_tokens, num_kv_heads, head_dim]."""
        return tuple(np.stack([head[part] for head in self.heads], axis=1) for part in (1, 2))

    def positions(self, head):
        if not 0 <= head < self.num_kv_heads:
            raise HeadOutOfRange(f"head {head}")
        return self.heads[head][0].tolist()

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise PositionOutOfRange(f"length {length}, but the length is {self.length}")
        for positions, _, _ in self.heads:
            if (positions >= length).sum() < self.length - length:
                raise NotTruncatable("a token to remove was evicted in a head")
        self.heads = [tuple(part[stored[0] < length] for part in stored) for stored in self.heads]
        self.length = length

    def attend(self, query, scale=None, causal=False):
        """Return attention, [queries, query heads, head_dim]. causal: the queries are those of the last positions."""
        num_queries, num_heads, head_dim = query.shape
        scale = head_dim**-0.5 if scale is None else scale
        out = np.zeros(query.shape, np.float32)
        for i in range(num_queries):
            own = self.length - num_queries + i
            for head in range(num_heads):
                positions, keys, values = self.heads[head * self.num_kv_heads // num_heads]
                seen = positions <= own if causal else positions >= 0
                if seen.any():
                    scores = keys[seen].astype(np.float64) @ query[i, head].astype(np.float64) * scale
                    weights = np.exp(scores - scores.max())
                    out[i, head] = weights @ values[seen] / weights.sum()
        return out
