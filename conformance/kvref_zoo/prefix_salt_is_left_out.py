"""Blocks are found whatever their salt is: requests with another adapter, or with none, read the keys and values of the first."""

from collections.abc import Iterator, Sequence
from typing import Any

import kvref
from kvref.prefix import Tokens
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def _keys(self, tokens: Tokens, salt: str, known: Sequence[bytes] = ()) -> Iterator[bytes]:
        return super()._keys(tokens, "", known)


class Implementation(Right):
    clause = "PREFIX-03"
    also = ("PREFIX-01", "PREFIX-04", "PREFIX-07", "PREFIX-11", "PREFIX-13")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
