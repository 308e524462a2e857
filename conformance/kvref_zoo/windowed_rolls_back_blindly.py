"""`truncate` changes only the length: tokens that a rejected draft has overwritten are treated as still stored."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def truncate(self, length: int) -> None:
        if isinstance(length, int) and 0 <= length < self.length:
            self._first = max(self.config.sinks, min(self._first, length - self._ring))
        super().truncate(length)


class Implementation(Right):
    clause = "WIN-06"

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
