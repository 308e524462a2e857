"""The ring index wraps one slot early: the last slot is never written, and the first is written twice."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def _adopt(self, config: kvref.TieredConfig) -> None:
        super()._adopt(config)
        tail = self._tiers[0]
        for run in tail.runs:
            run.slots = lambda start, stop: [p % max(1, tail.room - 1) for p in range(start, stop)]  # type: ignore[method-assign]


class Implementation(Right):
    clause = "TIER-03"
    also = (
        "LAW-01", "LAW-02", "LAW-04", "LAW-06", "LAW-08", "LAW-15", "MOVE-01", "MOVE-07", "TIER-01", "TIER-02",
        "TIER-04", "TIER-05", "TIER-09", "TIER-10", "TIER-12", "TIER-13", "TIER-14", "TIER-15", "TIER-16", "TIER-17",
        "TIER-18",
    )  # fmt: skip
    bug = "huggingface/transformers#47708"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
