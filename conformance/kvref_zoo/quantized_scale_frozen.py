"""The scale of the first token is used for all later tokens: larger values are clipped.

Fp8QuantizedLayer in transformers 5.23 uses the scale of the first update.
"""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    _most = np.inf

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        for layer in layers:
            if self._lengths[layer] == 0:
                self._most = np.maximum(np.abs(keys[:1]).max(), 1e-6)
        super()._append(layers, np.clip(keys, -self._most, self._most), values)


class Implementation(Right):
    clause = "LAW-04"
    also = (
        "LAW-01", "LAW-02", "LAW-05", "LAW-08", "LAW-14", "LAW-15", "MOVE-01", "QUANT-01", "QUANT-02", "QUANT-03",
        "QUANT-05", "QUANT-06", "QUANT-08", "QUANT-10",
    )  # fmt: skip

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
