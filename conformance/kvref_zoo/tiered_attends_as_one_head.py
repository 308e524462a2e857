"""Attention treats all heads of a token as one long vector: every head gets the same weights."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def attend(self, query: Any, scale: Any = None, causal: bool = False) -> Any:
        keys, values = self.read()
        if query.shape[1:] != keys.shape[1:] or not len(keys):
            return super().attend(query, scale, causal)
        flat = [part.reshape(part.shape[0], 1, -1) for part in (query, keys, values)]
        return kvref.attention(*flat, scale=scale, causal=causal).reshape(query.shape)


class Implementation(Right):
    clause = "TIER-11"
    also = ("ATTN-10", "TIER-09")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
