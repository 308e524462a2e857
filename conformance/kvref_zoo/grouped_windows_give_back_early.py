"""A window group frees its oldest block while the next query still sees the last token in it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref_zoo.right import Right


class Cache(kvref.GroupedCache):
    def _unseen(self, length: int) -> NDArray[np.int64]:
        return super()._unseen(length + 1)


class Implementation(Right):
    clause = "GROUP-02"
    also = ("GROUP-03", "GROUP-04", "GROUP-05", "GROUP-06", "GROUP-07", "GROUP-08", "LAW-04", "SHARE-03")

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
