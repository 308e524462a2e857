"""The constructor accepts any configuration: the cache fails later, during generation."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Config(kvref.TieredConfig):
    def __post_init__(self) -> None:
        """Checks nothing."""


class Implementation(Right):
    clause = "LAW-12"
    also = ("TIER-09", "TIER-17")
    bug = "Blaizzy/mlx-vlm#2061"

    def tiered(self, **config: Any) -> kvref.TieredCache:
        try:
            return kvref.TieredCache(kvref.TieredConfig(**config))
        except kvref.errors.ConfigError:
            cache = kvref.TieredCache.__new__(kvref.TieredCache)
            cache.config = Config(**config)
            return cache
