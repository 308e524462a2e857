"""Window groups never free a block, as if their layers saw all tokens: long requests use up the pool."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref_zoo.right import Right


class Cache(kvref.GroupedCache):
    def _unseen(self, length: int) -> NDArray[np.int64]:
        return np.zeros(self.config.num_groups, np.int64)


class Implementation(Right):
    clause = "GROUP-02"
    also = ("GROUP-03", "GROUP-04", "GROUP-05", "GROUP-06", "GROUP-07")

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
