"""`clear` empties the tail and not the store: the next prompt is read after the tokens of the last one."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def clear(self) -> None:
        self._tiers[0].let_go(len(self._tiers[0]))


class Implementation(Right):
    clause = "LAW-05"
    also = ("TIER-01", "TIER-09", "TIER-17")
    bug = "huggingface/transformers#45510"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
