"""The number of quantized tokens is a separate count, which `truncate` does not change.

Tokens that are appended below this count are read with the scales of the removed tokens.
"""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def __init__(self, config: kvref.QuantizedConfig) -> None:
        super().__init__(config)
        self._frontier = [0] * config.num_layers

    def truncate(self, length: int) -> None:
        frontier = [max(pair) for pair in zip(self._frontier, self._lengths, strict=True)]
        super().truncate(length)
        self._frontier = frontier

    def clear(self) -> None:
        super().clear()
        self._frontier = [0] * self.config.num_layers

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        slots, lengths = list[int](), list(self._lengths)
        for layer in layers:
            if lengths[layer] < self._frontier[layer]:
                slots.append(layer * self.config.capacity + lengths[layer])
            lengths[layer] += 1
        stores = (self._store.keys, self._store.values)
        scales = [np.array(store._stored.scale)[slots] for store in stores]
        super()._append(layers, keys, values)
        for store, scale in zip(stores, scales, strict=True):
            np.asarray(store._stored.scale)[slots] = scale


class Implementation(Right):
    clause = "EDIT-03"
    also = (
        "LAW-04",
        "MOVE-01",
        "QUANT-01",
        "QUANT-02",
        "QUANT-10",
    )
    bug = "rajveer43/VeloxQuant-MLX#369"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
