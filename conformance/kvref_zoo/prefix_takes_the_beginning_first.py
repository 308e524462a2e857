"""The first block of a dropped prompt is evicted first: the blocks after it are still cached and cannot be found."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.prefix import FindablePool
from kvref_zoo.right import Right


class Pool(FindablePool):
    def _give_back(self, blocks: NDArray[np.int32]) -> None:
        super()._give_back(blocks[::-1])


class Cache(kvref.PrefixCache):
    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self.pool = Pool(config.num_blocks)


class Implementation(Right):
    clause = "PREFIX-08"
    also = ("PAGED-13", "PAGED-16", "PREFIX-01", "PREFIX-09", "SHARE-05")

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
