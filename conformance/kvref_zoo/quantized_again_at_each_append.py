"""Each append dequantizes all tokens and quantizes them again: every token loses precision at every step.

QuantizedLayer in transformers 5.23 does so whenever its residual is full.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        before = [layer * self.config.capacity + p for layer in set(layers) for p in range(self._lengths[layer])]
        super()._append(layers, keys, values)
        if before:
            old_keys, old_values = self._store.read(before)
            self._store.write(before, old_keys * 0.999, old_values * 0.999)


class Implementation(Right):
    clause = "QUANT-05"
    also = (
        "EDIT-03", "LAW-01", "LAW-02", "LAW-04", "LAW-05", "LAW-06", "LAW-08", "LAW-15", "QUANT-01", "QUANT-02", "QUANT-03",
        "QUANT-06", "QUANT-08", "QUANT-10",
    )  # fmt: skip

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
