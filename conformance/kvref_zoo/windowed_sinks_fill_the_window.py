"""Sink tokens use slots of the window: if there are as many sink tokens as the window has slots, no new token is stored."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _write(self, keys: Any, values: Any) -> None:
        if self.config.sinks >= self.config.window and self.length >= self.config.sinks:
            keys, values = np.zeros_like(keys), np.zeros_like(values)
        super()._write(keys, values)


class Implementation(Right):
    clause = "WIN-05"
    also = ("LAW-04", "WIN-02", "WIN-06")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
