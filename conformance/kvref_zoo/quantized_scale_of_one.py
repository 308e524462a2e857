"""The scale of the values is ignored, and 1.0 is used in its place."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        super()._append(layers, keys, values)
        np.asarray(self._store.values._stored.scale)[...] = 1.0


class Implementation(Right):
    clause = "LAW-04"
    also = (
        "LAW-01", "LAW-02", "LAW-05", "LAW-08", "LAW-15", "QUANT-01", "QUANT-02", "QUANT-03", "QUANT-05", "QUANT-06",
        "QUANT-08", "QUANT-10",
    )  # fmt: skip
    bug = "sgl-project/sglang#20705"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
