"""`load` restores the codes and not the scales, which stay those of a cache that was never written."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def load(self, data: Any) -> None:
        super().load(data)
        slots = np.arange(self.config.num_layers * self.config.capacity)
        for part in (self._store.keys, self._store.values):
            for name in part.fields[1:]:
                part.put_field(name, slots, np.zeros_like(part.field(name, slots)))


class Implementation(Right):
    clause = "MOVE-01"
    also = ("MOVE-02", "MOVE-04")
    bug = "kekzl/imp#1189"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
