"""`attend` leaves out the tokens of the hit: a request with a hit gets another answer than a request without."""

from collections.abc import Sequence
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        sequence = super().begin(tokens, salt)
        self.hits = getattr(self, "hits", {}) | {sequence: self.length(sequence, 0)}
        return sequence

    def attend(self, sequence: int, layer: int, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        keys, values = self.gather(sequence, layer)
        since = getattr(self, "hits", {}).get(int(sequence), 0)
        since = since if since < len(keys) else 0
        return kvref.attention(query, keys[since:], values[since:], scale=scale, causal=causal)


class Implementation(Right):
    clause = "PREFIX-12"
    also = ("ATTN-10",)
    bug = "tenstorrent/vllm#415"

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
