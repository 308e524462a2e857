"""A rejected draft is taken back by counting: what it had overwritten is taken for what was there before."""

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
