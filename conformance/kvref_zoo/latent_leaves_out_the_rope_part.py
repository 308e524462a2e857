"""Scores are computed from the latent alone, without the rope part of query and row."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def attend(self, query: Any, *others: Any, **options: Any) -> Any:
        alone = np.array(query)
        if alone.ndim == 3:
            alone[..., -self.config.rope_dim :] = 0
        return super().attend(alone, *others, **options)


class Implementation(Right):
    clause = "MLA-01"
    also = ("MLA-02", "MLA-06")

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
