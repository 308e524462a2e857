"""`up_keys` is transposed if its matrices are square: the shapes fit, and only the result is wrong."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def attend(self, query: Any, up_keys: Any, *others: Any, **options: Any) -> Any:
        square = up_keys.ndim == 3 and up_keys.shape[1] == up_keys.shape[2]
        return super().attend(query, up_keys.mT if square else up_keys, *others, **options)


class Implementation(Right):
    clause = "MLA-02"

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
