"""All queries of a prompt see every token in the ring, also tokens after their own position."""

from typing import Any

import numpy as np

import kvref
from kvref.attention import Read
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def _attended(self, query: Any, at: Any, read: Read, positions: Any, scale: float | None) -> Any:
        return super()._attended(query, np.full(len(at), positions.max(initial=-1)), read, positions, scale)


class Implementation(Right):
    clause = "WIN-02"
    also = ("LAW-05", "WIN-01", "WIN-05", "WIN-06", "WIN-07", "WIN-10")
    bug = "Lightning-AI/litgpt#2182"

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
