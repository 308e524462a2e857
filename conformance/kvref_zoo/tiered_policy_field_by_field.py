"""`update_policy` applies one field at a time.

Fields before an invalid one stay changed, and changes that are valid only together are rejected.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    def update_policy(self, **changes: Any) -> None:
        for name, value in changes.items():
            super().update_policy(**{name: value})


class Implementation(Right):
    clause = "TIER-10"
    also = ("LAW-04", "TIER-01", "TIER-02", "TIER-08", "TIER-14")

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
