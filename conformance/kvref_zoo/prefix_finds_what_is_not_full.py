"""The last block of a prompt is found before it is full: two sequences write the rest of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvref
from kvref.prefix import Found
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        super().commit(sequence, tokens)
        rest = len(tokens) % self.config.block_size
        if rest:  # pad the block's tokens with zeros and add it to the prefix index
            size, table, told = self.config.block_size, self._table(sequence), self._told[int(sequence)]
            filled = [*told.tokens[: len(tokens)], *[0] * (size - rest)]
            *_, key = self._keys(filled, told.salt)
            blocks = self._tables.at(table, np.arange(self.config.num_layers), len(tokens) // size)
            self.pool.make_findable(Found(key, blocks))


class Implementation(Right):
    clause = "PREFIX-04"
    also = ("PAGED-13", "PAGED-16")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
