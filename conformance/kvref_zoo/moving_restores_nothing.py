"""`load` reads the file and reports success, but the cache does not get the contents."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.QuantizedCache):
    def load(self, data: Any) -> None:
        kvref.QuantizedCache(self.config).load(data)


class Implementation(Right):
    clause = "MOVE-01"
    also = ("MOVE-02", "MOVE-03", "MOVE-04", "MOVE-07")
    bug = "ggml-org/llama.cpp#26676"

    def quantized(self, **config: Any) -> Cache:
        return Cache(kvref.QuantizedConfig(**config))
