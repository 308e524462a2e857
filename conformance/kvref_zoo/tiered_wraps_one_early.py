"""The ring's index wraps one slot early: the last slot is never written, and the first one twice."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def _open_run(self, tier: Any) -> None:
        super()._open_run(tier)
        if tier.name == "tail" and tier.runs:
            run = tier.runs[-1]
            run.slots = lambda start, stop: [position % max(1, tier.room - 1) for position in range(start, stop)]


class Implementation(Right):
    clause = "TIER-03"
    also = (
        "LAW-01", "LAW-02", "LAW-04", "LAW-06", "LAW-08", "LAW-15", "TIER-01", "TIER-02", "TIER-04", "TIER-05",
        "TIER-09", "TIER-10", "TIER-12", "TIER-13", "TIER-14", "TIER-15",
    )  # fmt: skip
    bug = "huggingface/transformers#47708"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
