"""Each row is stored twice, as a key and as a value."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    @property
    def num_bytes(self) -> int:
        return 2 * super().num_bytes


class Implementation(Right):
    clause = "MLA-03"
    also = ("MLA-06",)
    bug = "ggml-org/llama.cpp#19067"

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
