"""The ring contains as many tokens as the window before the next token is added.

The oldest token is evicted one step too early.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _write(self, keys: Any, values: Any) -> None:
        super()._write(keys, values)
        if self.config.window > 1:
            self._first = max(self._first, min(self.length, self.length - self._ring + 2))


class Implementation(Right):
    clause = "WIN-01"
    also = ("EDIT-02", "LAW-05", "MOVE-01", "WIN-02", "WIN-03", "WIN-04", "WIN-05", "WIN-06", "WIN-07", "WIN-10")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
