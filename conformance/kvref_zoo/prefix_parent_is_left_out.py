"""A block is identified by its own tokens alone: it is found after any other tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import kvref
from kvref.prefix import Tokens
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def _keys(self, tokens: Tokens, salt: str, known: Sequence[bytes] = ()) -> Iterator[bytes]:
        size = self.config.block_size
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            yield from super()._keys(tokens[start : start + size], salt)


class Implementation(Right):
    clause = "PREFIX-03"
    also = ("PREFIX-01", "PREFIX-04", "PREFIX-07")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
