"""A prompt whose blocks are all cached is found completely: no token is left to compute the first logits from."""

from typing import Any

import kvref
from kvref.prefix import Found, Tokens
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def _find(self, tokens: Tokens, salt: str) -> list[Found]:
        return super()._find([*tokens, 0], salt)


class Implementation(Right):
    clause = "PREFIX-01"
    also = ("PREFIX-05", "PREFIX-07", "PREFIX-13")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
