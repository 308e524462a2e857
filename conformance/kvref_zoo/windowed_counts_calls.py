"""The window is counted in calls instead of tokens: a prompt is one call, and is stored until as many further calls were made."""

from dataclasses import replace
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def __init__(self, config: kvref.WindowedConfig) -> None:
        super().__init__(replace(config, rollback=2**12))
        self.config, self._ends = config, list[int]()

    def _write(self, keys: Any, values: Any) -> None:
        super()._write(keys, values)
        self._ends.append(self.length)
        kept = self.config.window + self.config.rollback
        if len(self._ends) > kept:
            self._first = max(self._first, min(self._ends[-kept - 1], self.length - kept))


class Implementation(Right):
    clause = "WIN-04"
    also = ("MOVE-01",)

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
