"""`fork` copies all tokens: sixteen samples of one prompt take sixteen times its memory."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def fork(self, sequence: int) -> int:
        child = super().fork(sequence)
        for layer in range(self.config.num_layers):
            self._prepare({}, self._table(child), layer, np.arange(self.length(child, layer)))
        return child


class Implementation(Right):
    clause = "SHARE-03"
    also = ("EDIT-10", "MOVE-03", "SHARE-05", "SHARE-07")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
