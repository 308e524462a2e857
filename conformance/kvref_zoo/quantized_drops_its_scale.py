"""Reads return the codes without multiplying them by their scale."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def read_tokens(self, layer: int, positions: Any) -> Any:
        keys, values = super().read_tokens(layer, positions)
        slots = [layer * self.config.capacity + position for position in positions]
        scale = np.asarray(self._store.keys._stored.scale)[slots]
        return (keys / scale[..., None]).astype("float32"), values


class Implementation(Right):
    clause = "LAW-04"
    also = (
        "ATTN-10", "LAW-01", "LAW-02", "LAW-05", "LAW-08", "LAW-15", "MOVE-01", "QUANT-01", "QUANT-02", "QUANT-03", "QUANT-04",
        "QUANT-05", "QUANT-06", "QUANT-08", "QUANT-10",
    )  # fmt: skip
    bug = "vllm-project/vllm#42580"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
