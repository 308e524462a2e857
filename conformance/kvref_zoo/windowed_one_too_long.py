"""The window counts the tokens before the query without the query's own: each query sees one token too many."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Sight(kvref.Sight):
    def first(self, query: Any) -> Any:
        return super().first(query) - (not self.chunk)


class Cache(kvref.WindowedCache):
    def __init__(self, config: kvref.WindowedConfig) -> None:
        super().__init__(config)
        self._sight = Sight(config.window, config.sinks, config.chunk)


class Implementation(Right):
    clause = "WIN-01"
    also = ("ATTN-07", "LAW-05", "WIN-02", "WIN-05", "WIN-06", "WIN-10")

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
