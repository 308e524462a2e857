"""Wrong sharded caches."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.online_softmax import Partial
from kvref.sharded import _Rank
from kvref_zoo.mutant import mutant


class OwnRanks(kvref.ShardedCache):
    """A cache whose ranks belong to a class of its own."""

    Rank = _Rank

    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        self._ranks = [self.Rank(config, number, self._backend) for number in range(config.num_ranks)]


@mutant("SHARD-03", also="SHARD-04", seen_in="GeeeekExplorer/nano-vllm#187")
class ShardedAllocatesForOwnTokensOnly(OwnRanks):
    """Each rank allocates blocks for its own tokens only, so that the block tables of the ranks differ in length."""

    class Rank(_Rank):
        def be(self, length: int) -> None:
            own = len(self.positions(0, length))
            super().be(own * self._config.token_ranks)
            self.length = length


@mutant("SHARD-04")
class ShardedAppendHalfWritten(kvref.ShardedCache):
    """If a rank is lost during an append, the ranks before it have already written.

    They contain tokens that the others do not have.
    """

    def append(self, keys: Any, values: Any) -> None:
        failing = set(self._failing)
        try:
            super().append(keys, values)
        except kvref.errors.RankLost:
            for rank in self._ranks[: min(failing)] if failing and len(keys) else ():
                if rank is not None:
                    rank.keep(len(keys), rank.prepared(keys, values))
            raise


@mutant("SHARD-02")
class ShardedAveragesItsRanks(OwnRanks):
    """The partial attention outputs of the ranks are averaged with equal weights, whatever the weights of their tokens are."""

    class Rank(_Rank):
        def partials(self, query: Any, at: Any, scale: float) -> Iterator[Partial]:
            for one in super().partials(query, at, scale):
                total = np.where(one.total > 0, one.total, 1)
                yield replace(one, largest=np.where(one.seen, 0, one.largest), total=one.total / total, values=one.values / total)


@mutant("SHARD-01", also="EDIT-03 LAW-05 SHARD-02 SHARD-03 SHARD-04")
class ShardedCopyIsNotWritten(kvref.ShardedCache):
    """If kv heads are replicated, a decoded token is written to the first copy of its head only."""

    class Rank(_Rank):
        def keep(self, count: int, share: Any) -> None:
            super().keep(count, tuple(part._replace(codes=part.codes * 0) for part in share) if count == 1 else share)

    def __init__(self, config: kvref.ShardedConfig) -> None:
        super().__init__(config)
        for number in range(config.num_ranks):
            if number // config.token_ranks % config.copies:
                self._ranks[number] = self.Rank(config, number, self._backend)


@mutant("SHARD-02", seen_in="vllm-project/vllm#28840")
class ShardedMergesLogarithmsOfTwoBases(OwnRanks):
    """Each rank reports the base-2 logarithm of its sum of weights, and they are merged as natural logarithms."""

    class Rank(_Rank):
        def partials(self, query: Any, at: Any, scale: float) -> Iterator[Partial]:
            for one in super().partials(query, at, scale):
                total = np.where(one.total > 0, one.total, 1)
                logarithm = (one.largest + np.log(total)) / np.float32(math.log(2))
                mean = replace(one, largest=logarithm, total=np.ones_like(total), values=one.values / total)
                yield replace(mean, total=np.where(one.seen, mean.total, 0), values=np.where(one.seen, mean.values, 0))


@mutant("SHARD-02", also="EDIT-01 EDIT-02 EDIT-03 SHARD-01 SHARD-03 SHARD-04", seen_in="vllm-project/vllm#51031")
class ShardedRankByTheKernelsBlock(OwnRanks):
    """The rank of a token is computed with the kernel's block size, half of the cache's.

    The second half of each block is on the next rank.
    """

    class Rank(_Rank):
        def positions(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
            every: NDArray[np.int64] = np.arange(start, self.length if stop is None else stop)
            kernel = max(1, self._config.block_size // 2)
            return np.asarray(every[every // kernel % self._config.token_ranks == self._column])

        def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            kernel = max(1, self._config.block_size // 2)
            own = positions // (kernel * self._config.token_ranks) * kernel + positions % kernel
            found: NDArray[np.int64] = np.array(self.table, np.int64)[own // self._config.block_size]
            return found * self._config.block_size + own % self._config.block_size
