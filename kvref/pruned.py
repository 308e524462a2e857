"""The pruned cache: tokens are evicted by scores, separately in each head (H2O, SnapKV, TOVA, StreamingLLM).

Row i of a head is its stored token with the i-th smallest position. All heads store the same number of tokens, so that keys and
values are arrays [stored_tokens, num_kv_heads, head_dim], and `positions` tells which tokens they are. The caller computes the
scores, for example from attention weights.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Sight, accept_query, attended
from kvref.backend import Backend, reference
from kvref.errors import (
    CapacityExceeded,
    HeadOutOfRange,
    NonFinite,
    NotTruncatable,
    PositionOutOfRange,
    in_range,
    whole_fields,
)
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class PrunedConfig:
    """Sizes of a PrunedCache. max_tokens: the largest number of stored tokens per head. Raises ConfigError (LAW-12)."""

    num_kv_heads: int = 8
    head_dim: int = 128
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "max_tokens")


class PrunedCache:
    """A cache of one sequence and layer that evicts tokens by scores (chapter PRUNED). Keys and values are float32.

    length: the number of tokens that were appended and not truncated, which is the position of the next token (PRUNED-04).
    """

    def __init__(self, config: PrunedConfig, backend: Backend = reference) -> None:
        self.config = config
        self._backend = backend
        self.length = 0
        self._keys = self._values = self._no_tokens()
        self._positions: NDArray[np.int64] = np.zeros((0, config.num_kv_heads), np.int64)  # per row and head, ascending

    @property
    def stored_tokens(self) -> int:
        """The number of tokens that each head stores, at most max_tokens."""
        return len(self._positions)

    def append(self, keys: Array, values: Array) -> None:
        """Append tokens [n, num_kv_heads, head_dim] in every head (PRUNED-01).

        Raises CapacityExceeded, ShapeMismatch or DtypeMismatch.
        """
        heads, xp = self.config.num_kv_heads, self._backend.xp
        keys, values = accept_pair(keys, values, ("n", heads, self.config.head_dim), self._backend)
        new = keys.shape[0]
        if self.stored_tokens + new > self.config.max_tokens:
            got = f"got {self.stored_tokens + new}"
            raise CapacityExceeded(f"append: expected at most {self.config.max_tokens} stored tokens, {got}")
        positions = np.repeat(np.arange(self.length, self.length + new)[:, None], heads, axis=1)
        self._keys, self._values = xp.concat([self._keys, keys]), xp.concat([self._values, values])
        self._positions = np.concatenate([self._positions, positions])
        self.length += new

    def prune(self, scores: Array, keep: int, sinks: int = 0, recent: int = 0) -> None:
        """Evict all stored tokens of each head but `keep` (PRUNED-02). It changes nothing if there are not more.

        scores: [num_kv_heads, stored_tokens], in the order of `read`. Kept are the first `sinks` and the last `recent` stored
        tokens, and of the others those with the largest scores; of equal scores, the earlier token.

        Raises ShapeMismatch, DtypeMismatch, NonFinite if a score is NaN or infinite, or PositionOutOfRange if `keep` is less than
        1 or than sinks + recent (PRUNED-07).
        """
        scores = accept("scores", scores, (self.config.num_kv_heads, self.stored_tokens), self._backend)
        given = np.asarray(self._backend.to_numpy(scores), np.float32)
        if not np.isfinite(given).all():
            raise NonFinite("scores: expected finite numbers")
        sinks, recent = (in_range(each, None, PositionOutOfRange, name) for each, name in ((sinks, "sinks"), (recent, "recent")))
        keep = in_range(keep, None, PositionOutOfRange, "keep")
        if keep < max(1, sinks + recent):
            raise PositionOutOfRange(f"keep: expected at least {max(1, sinks + recent)}, got {keep}")
        if self.stored_tokens <= keep:
            return
        by_rank = given.copy()
        by_rank[:, :sinks] = np.inf
        by_rank[:, self.stored_tokens - recent :] = np.inf
        best = np.argsort(-by_rank, axis=1, kind="stable")[:, :keep]  # stable: of equal scores the earlier token is first
        self._keep(np.sort(best, axis=1).T)

    def truncate(self, length: int) -> None:
        """Remove the tokens at positions from `length` on (PRUNED-08).

        Raises PositionOutOfRange, or NotTruncatable if a head has evicted one of them.
        """
        length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        removed = self.length - length
        first = self.stored_tokens - removed  # the row of position `length`, if every head stores all tokens from it on
        for head in range(self.config.num_kv_heads):
            stored = self._positions[max(first, 0) :, head]
            if first < 0 or not np.array_equal(stored, np.arange(length, self.length)):
                missing = next(at for at in range(length, self.length) if at not in self._positions[:, head])
                raise NotTruncatable(f"truncate: position {missing} is evicted in head {head}")
        self._keep(np.repeat(np.arange(first)[:, None], self.config.num_kv_heads, axis=1))
        self.length = length

    def clear(self) -> None:
        """Remove all tokens."""
        self.length = 0
        self._keys = self._values = self._no_tokens()
        self._positions = self._positions[:0]

    def _no_tokens(self) -> Array:
        return self._backend.zeros((0, self.config.num_kv_heads, self.config.head_dim), "float32")

    def read(self) -> tuple[Array, Array]:
        """Return the keys and values of the stored tokens, as copies: float32 [stored_tokens, num_kv_heads, head_dim] each."""
        xp = self._backend.xp
        return xp.asarray(self._keys, copy=True), xp.asarray(self._values, copy=True)

    def positions(self, head: int) -> list[int]:
        """Return the positions of the stored tokens of a head, in the order of `read`. Raises HeadOutOfRange."""
        head = in_range(head, self.config.num_kv_heads, HeadOutOfRange, "head")
        found: list[int] = self._positions[:, head].tolist()
        return found

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return the attention of each query head over the stored tokens of its kv head (PRUNED-05).

        query: [n, num_query_heads, head_dim]. scale: None means 1/sqrt(head_dim). causal: query i is at position length - n + i
        and sees positions up to its own. Returns float32 [n, num_query_heads, head_dim], zeros where a query sees no token.
        Raises ShapeMismatch or DtypeMismatch.
        """
        heads = self.config.num_kv_heads
        query = accept_query(query, "num_queries", heads, self.config.head_dim, self._backend)
        count, group = query.shape[0], query.shape[1] // heads
        at = np.arange(self.length - count, self.length) if causal else np.full(count, self.length - 1)
        scale = 1 / math.sqrt(self.config.head_dim) if scale is None else scale
        parts = []
        for head in range(heads):
            asked, positions = query[:, head * group : (head + 1) * group, :], self._positions[:, head]
            parts.append(attended(asked, at, partial(self._read_head, head), positions, scale, Sight(), self._backend))
        return self._backend.xp.concat(parts, axis=1)

    def _read_head(self, head: int, start: int, stop: int) -> tuple[Array, Array]:
        """The keys and values in the rows [start, stop) of one head: [stop - start, 1, head_dim] each."""
        return self._keys[start:stop, head : head + 1, :], self._values[start:stop, head : head + 1, :]

    def _keep(self, rows: NDArray[np.int64]) -> None:
        """Keep these rows of each head: [kept tokens, num_kv_heads], ascending."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        flat = (rows * heads + np.arange(heads)).reshape(-1)
        xp = self._backend.xp
        for name in ("_keys", "_values"):
            of_head = xp.reshape(getattr(self, name), (self.stored_tokens * heads, dim))
            setattr(self, name, xp.reshape(self._backend.gather(of_head, flat), (len(rows), heads, dim)))
        self._positions = np.take_along_axis(self._positions, rows, axis=0)
