"""A flush of the keys also clears the values of the same tokens, which are still stored in full.

They read as zeros until they are quantized.
"""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ChannelCache):
    def append(self, keys: Any, values: Any) -> None:
        flushed = self.quantized_keys
        super().append(keys, values)
        if self.quantized_keys > flushed:
            slots = np.arange(self.quantized_values, self.quantized_keys) % self._ring
            nothing = np.zeros((len(slots), self.config.num_kv_heads, self.config.head_dim), np.float32)
            self._full.write(slots, nothing, nothing)


class Implementation(Right):
    clause = "KIVI-02"
    also = ("KIVI-01", "KIVI-03", "KIVI-04", "KIVI-08")

    def channels(self, **config: Any) -> Cache:
        return Cache(kvref.ChannelConfig(**config))
