"""A write to a fork overwrites the shared block in place: every sample of a prompt reads the tokens of the last one."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def _kept(self, blocks: Any) -> Any:
        return np.zeros(blocks.shape, bool)


class Implementation(Right):
    clause = "SHARE-04"
    also = ("EDIT-04", "EDIT-05", "EDIT-10", "PAGED-18", "SHARE-05", "SHARE-07", "SHARE-08")

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
