"""The value is made from the last `rank` numbers of a row instead of the first.

It includes the rope part and lacks part of the latent.
"""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False) -> Any:
        rank, rows = self.config.rank, self.read()
        absorbed = np.einsum("qhn,hnr->qhr", query[..., : -self.config.rope_dim], up_keys)
        whole = np.concatenate([absorbed, query[..., -self.config.rope_dim :]], axis=2)
        latents = kvref.attention(whole, rows[:, None, :], rows[:, None, -rank:], scale=scale, causal=causal)
        return np.einsum("qhr,hvr->qhv", latents, up_values)


class Implementation(Right):
    clause = "MLA-01"
    also = ("LAW-10", "MLA-02", "MLA-06")
    bug = "sgl-project/sglang#38666"

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
