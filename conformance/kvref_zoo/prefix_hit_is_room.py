"""Evictable blocks of the hit also count as room for the rest of the prompt: `begin` accepts a prompt that does not fit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.prefix import FindablePool
from kvref_zoo.right import Right


class Pool(FindablePool):
    def num_waiting(self, blocks: NDArray[np.int32]) -> int:
        return 0


class Cache(kvref.PrefixCache):
    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self.pool = Pool(config.num_blocks)


class Implementation(Right):
    clause = "PREFIX-13"

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
