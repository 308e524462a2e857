"""Wrong pruned caches."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant


@mutant("PRUNED-02", also="PRUNED-06", seen_in="NVIDIA/kvpress#264")
class PrunedEmptiesShortContexts(kvref.PrunedCache):
    """The number of tokens to keep is a share that is rounded down: a context of one token is pruned to none."""

    def prune(self, scores: Any, keep: int, sinks: int = 0, recent: int = 0) -> None:
        super().prune(scores, keep, sinks, recent)
        if self.stored_tokens == 1:
            self._keep(np.zeros((0, self.config.num_kv_heads), np.int64))


@mutant("PRUNED-02", seen_in="JaydenLyh/Reward-Forcing#5")
class PrunedEvictsTheNewest(kvref.PrunedCache):
    """`recent` protects the tokens after the sinks, which are the oldest: the newest tokens are evicted."""

    def prune(self, scores: Any, keep: int, sinks: int = 0, recent: int = 0) -> None:
        valid = recent >= 0 and sinks + recent <= keep
        super().prune(scores, keep, *((sinks + recent, 0) if valid else (sinks, recent)))


@mutant("PRUNED-04", also="PRUNED-01 PRUNED-02 PRUNED-03 PRUNED-05 PRUNED-06 PRUNED-08", seen_in="rajveer43/VeloxQuant-MLX#137")
class PrunedCountsStoredTokens(kvref.PrunedCache):
    """The position of the next token is the number of stored tokens: after an eviction, keys are rotated for wrong places."""

    def prune(self, scores: Any, keep: int, sinks: int = 0, recent: int = 0) -> None:
        super().prune(scores, keep, sinks, recent)
        self.length = self.stored_tokens


@mutant("PRUNED-05", seen_in="rajveer43/VeloxQuant-MLX#370")
class PrunedCausalMaskOfRows(kvref.PrunedCache):
    """The causal mask is aligned to the last rows, as if no token were missing between them."""

    def attend(self, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        keys, values = self.read()
        return kvref.attention(query, keys, values, scale=scale, causal=causal)


@mutant("PRUNED-03", also="PRUNED-01 PRUNED-02 PRUNED-04 PRUNED-05 PRUNED-06 PRUNED-07 PRUNED-08")
class PrunedByTheFirstHead(kvref.PrunedCache):
    """The tokens that the first head keeps are kept in all heads."""

    def prune(self, scores: Any, keep: int, sinks: int = 0, recent: int = 0) -> None:
        super().prune(np.repeat(scores[:1], len(scores), axis=0), keep, sinks, recent)
