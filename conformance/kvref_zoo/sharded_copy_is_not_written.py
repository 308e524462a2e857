"""If kv heads are replicated, a decoded token is written to the first copy of its head only."""

from typing import Any

import kvref
from kvref.sharded import _Rank
from kvref_zoo.right import Right


class Copy(_Rank):
    def keep(self, count: int, share: Any) -> None:
        super().keep(count, tuple(part._replace(codes=part.codes * 0) for part in share) if count == 1 else share)


class Cache(kvref.ShardedCache):
    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        for number in range(config.num_ranks):
            if number // config.token_ranks % config.copies:
                self._ranks[number] = Copy(config, number, self._backend)


class Implementation(Right):
    clause = "SHARD-01"
    also = ("EDIT-03", "SHARD-02", "SHARD-03", "SHARD-04")

    def sharded(self, **config: Any) -> Cache:
        return Cache(kvref.ShardedConfig(**config))
