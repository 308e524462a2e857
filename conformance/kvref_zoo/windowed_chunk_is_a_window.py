"""Chunked attention is computed with a sliding window of the same length: the first tokens of a chunk see the chunk before."""

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
