"""Chunked attention is done with a window as long as a chunk: the first token of a chunk sees the one before."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def __init__(self, config: kvref.WindowedConfig) -> None:
        super().__init__(config)
        self._sight = kvref.Sight(config.window, config.sinks)


class Implementation(Right):
    clause = "WIN-07"
    also = ("WIN-06",)

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
