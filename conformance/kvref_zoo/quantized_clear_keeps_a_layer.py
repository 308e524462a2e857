"""`clear` empties the first layer only. The other layers keep their tokens."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def clear(self) -> None:
        self._lengths[0] = 0


class Implementation(Right):
    clause = "QUANT-08"
    also = ("LAW-05",)

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
