"""A step that does not fit in the last layer stays in those before it."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def _push(self, layers: range, keys: Any, values: Any) -> None:
        for row, layer in enumerate(layers):
            super()._push(range(layer, layer + 1), keys[row : row + 1], values[row : row + 1])


class Implementation(Right):
    clause = "LAW-01"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
