"""If a rank is lost during an append, the ranks before it have already written.

They contain tokens that the others do not have.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ShardedCache):
    def append(self, keys: Any, values: Any) -> None:
        failing = set(self._failing)
        try:
            super().append(keys, values)
        except kvref.errors.RankLost:
            for rank in self._ranks[: min(failing)] if failing and len(keys) else ():
                if rank is not None:
                    rank.keep(len(keys), rank.prepared(keys, values))
            raise


class Implementation(Right):
    clause = "SHARD-04"

    def sharded(self, **config: Any) -> Cache:
        return Cache(kvref.ShardedConfig(**config))
