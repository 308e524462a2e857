"""`truncate` shortens the first layer only: the other layers keep the removed tokens and are longer from then on."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def truncate(self, length: int) -> None:
        others = self._lengths[1:]
        super().truncate(length)
        self._lengths[1:] = others


class Implementation(Right):
    clause = "EDIT-01"
    also = ("EDIT-03",)
    bug = "ml-explore/mlx-swift-lm#173"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
