"""Whether a token leaves the tail depends on the number of tokens in the call.

Tokens that are appended one at a time never leave it.
"""

from dataclasses import replace
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def append(self, keys: Any, values: Any) -> None:
        tail = self._tiers[0]
        if len(keys) == 1 and tail.room:
            tail.room = max(tail.room, len(tail) + 1)
        super().append(keys, values)


class Implementation(Right):
    clause = "LAW-06"
    also = (
        "ATTN-10", "LAW-01", "LAW-04", "LAW-16", "LAW-17", "MOVE-01", "TIER-01", "TIER-02", "TIER-03", "TIER-04",
        "TIER-05", "TIER-06", "TIER-07", "TIER-09", "TIER-10", "TIER-13", "TIER-14", "TIER-17", "TIER-18",
    )  # fmt: skip
    bug = "rajveer43/VeloxQuant-MLX#86"

    def tiered(self, **config: Any) -> Cache:
        sizes = kvref.TieredConfig(**config)
        return Cache(replace(sizes, migration_batch=sizes.max_tokens))  # room in the tail for all tokens that stay there
