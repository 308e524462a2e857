"""The compression ratio is computed as the bytes of the tail over the bytes of the store."""

from dataclasses import replace
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def stats(self) -> Any:
        stats = super().stats()
        return replace(stats, compression_ratio=stats.tail_bytes / max(1, stats.store_bytes))


class Implementation(Right):
    clause = "TIER-08"
    also = ("TIER-09",)

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
