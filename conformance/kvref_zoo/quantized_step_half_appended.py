"""A step that does not fit into the last layer remains in the layers before it."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        for token, layer in enumerate(layers):
            super()._append([layer], keys[token : token + 1], values[token : token + 1])


class Implementation(Right):
    clause = "LAW-01"
    also = ("QUANT-01",)

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
