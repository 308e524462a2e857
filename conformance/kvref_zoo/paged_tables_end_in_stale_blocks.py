"""In `block_tables` short tables are padded with block ids of other sequences instead of -1: a kernel reads their tokens."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def block_tables(self, sequences: Any, layer: int) -> Any:
        tables = super().block_tables(sequences, layer)
        return np.where(tables < 0, tables.max(axis=0, initial=-1), tables)


class Implementation(Right):
    clause = "PAGED-17"
    bug = "gittensor-ai-lab/sparkinfer#185"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
