"""Each flush quantizes all quantized keys again, with one scale per channel: old tokens lose precision at every flush.

The QuantizedLayer of transformers 5.23 also quantizes its history again whenever its residual is full, in groups of a fixed
size.
"""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ChannelCache):
    def append(self, keys: Any, values: Any) -> None:
        flushed = self.quantized_keys
        before = self._read(0, flushed)[0]
        super().append(keys, values)
        count = self.quantized_keys
        if 0 < flushed < count:
            history = np.concatenate([before, self._read(flushed, count)[0]])
            least, largest = history.min(axis=0), history.max(axis=0)
            scale = np.maximum((largest - least) / np.float32(self.config.groups.top), np.float32(2.0**-23))
            again = np.rint((history - least) / scale) * scale + least
            self._keys.put(range(count // self.config.groups.group), self._keys.quantized(self._by_channel(again)))


class Implementation(Right):
    clause = "KIVI-03"
    also = ("KIVI-01", "KIVI-04", "KIVI-08")

    def channels(self, **config: Any) -> Cache:
        return Cache(kvref.ChannelConfig(**config))
