"""Scores are scaled by the width of a row instead of the width of a head's key: right only if both are equal."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False) -> Any:
        row = self.config.rank + self.config.rope_dim
        return super().attend(query, up_keys, up_values, scale * (query.shape[-1] / row) ** 0.5, causal)


class Implementation(Right):
    clause = "MLA-02"
    also = ("MLA-01", "MLA-06")

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
