"""Whether a token is old is asked of this call's length: tokens that come one by one never leave the tail."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def _make_room(self, index: int, count: int) -> None:
        tier = self._tiers[index]
        if index == 0 and count == 1 and self.config.tail_length:
            tier.room = tier.runs[-1].capacity = max(tier.room, len(tier) + 1)
        super()._make_room(index, count)


class Implementation(Right):
    clause = "LAW-06"
    also = (
        "ATTN-10", "LAW-04", "LAW-16", "LAW-17", "TIER-01", "TIER-02", "TIER-03", "TIER-04", "TIER-05", "TIER-06",
        "TIER-07", "TIER-09", "TIER-10", "TIER-13", "TIER-14",
    )  # fmt: skip
    bug = "rajveer43/VeloxQuant-MLX#86"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
