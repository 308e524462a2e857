"""The windowed cache: a ring of the newest tokens, after a few sink tokens that are never evicted.

The token at position p is in slot p if it is one of the first `sinks`, otherwise in slot sinks + (p - sinks) % ring. The ring has
window + rollback slots: one per token of the window, and one per token that `truncate` can always remove.

A new token overwrites the oldest one of the ring. The last tokens of a long step therefore overwrite tokens that its first
queries see. For this reason `step` computes attention over the stored and the new tokens first, and writes the new ones
afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Read, Sight, accept_query, attended
from kvref.backend import Backend, reference
from kvref.errors import FileDamaged, NotTruncatable, PositionOutOfRange, in_range, whole_fields
from kvref.formats import Quantized, get_format
from kvref.serialization import Serializable
from kvref.snapshot import Contents, SavedState, TokenSpan, key_and_value_spans, shape_of
from kvref.token_store import TokenStore
from kvref.validation import accept_pair


@dataclass(frozen=True)
class WindowedConfig:
    """Sizes and format of a WindowedCache. Raises ConfigError (LAW-12).

    - `window`, `sinks`, `chunk`: which tokens a query sees, as in `kvref.attention.Sight`. `chunk` is 0 for no chunks.
    - `rollback`: the number of newest tokens that `truncate` can always remove, such as a rejected draft (WIN-06).
    - `dtype`: the name of any format (WIN-10). If it has groups, `head_dim` must be a multiple of the group. Static formats have
      the scale 1.0.
    """

    num_kv_heads: int
    head_dim: int
    window: int
    sinks: int = 0
    chunk: int = 0
    rollback: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "window")
        whole_fields(self, "sinks", "chunk", "rollback", minimum=0)
        # code_width raises ConfigError unless head_dim is a multiple of the group
        get_format(self.dtype, argument="dtype").code_width(self.head_dim)


class WindowedCache(Serializable):
    """A cache of one sequence and layer with a sliding window, sink tokens or chunks (chapter WIN).

    `length` is the number of tokens that were appended and not truncated, which is the position of the next token. The cache
    stores at most sinks + window + rollback of them.
    """

    _saved_attributes = ("_store", "length", "_first")

    def __init__(self, config: WindowedConfig, backend: Backend = reference) -> None:
        """Allocate memory for sinks + window + rollback tokens on the device of `backend`."""
        self.config = config
        self.length = 0
        self._first = config.sinks  # the first position in the ring
        self._ring = config.window + config.rollback
        self._sight = Sight(config.window, config.sinks, config.chunk)
        self._backend = backend
        slots = config.sinks + self._ring
        self._store = TokenStore(backend, get_format(config.dtype), slots, config.num_kv_heads, config.head_dim)

    @property
    def stored_tokens(self) -> int:
        """The number of stored tokens, at most sinks + window + rollback (WIN-04)."""
        return len(self._positions())

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens. keys, values: [n, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch or NonFinite.
        """
        keys, values = self._accepted(keys, values)
        self._write(self._store.quantized(keys, values), keys.shape[0])

    def step(self, query: Array, keys: Array, values: Array, scale: float | None = None) -> Array:
        """Append n tokens, and return the attention of their queries: float32 [n, num_query_heads, head_dim] (WIN-02).

        query: [n, num_query_heads, head_dim], one query per token. keys, values: [n, num_kv_heads, head_dim]. scale:
        1 / sqrt(head_dim) by default. Each query sees the tokens of its own window, in the format of the cache (WIN-10).

        Raises ShapeMismatch, DtypeMismatch or NonFinite, and then appends nothing.
        """
        keys, values = self._accepted(keys, values)
        query = accept_query(query, keys.shape[0], self.config.num_kv_heads, self.config.head_dim, self._backend)
        stored = self._store.quantized(keys, values)  # once: attention uses the bits that are stored (WIN-10)
        held, new = self._positions(), np.arange(self.length, self.length + keys.shape[0])
        coming, count = self._store.dequantized(stored), len(held)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            before = self._store.read(self._slots(held[start:stop]))
            there = (part[max(start - count, 0) : max(stop - count, 0), ...] for part in coming)
            keys, values = (self._backend.xp.concat(both, axis=0) for both in zip(before, there, strict=True))
            return keys, values

        out = self._attended(query, new, read, np.concatenate([held, new]), scale)
        self._write(stored, keys.shape[0])
        return out

    def attend(self, query: Array, scale: float | None = None) -> Array:
        """Return the attention of queries at the position of the newest token: float32 [num_queries, num_query_heads, head_dim].

        query: [num_queries, num_query_heads, head_dim]. scale: 1 / sqrt(head_dim) by default.

        Raises ShapeMismatch, DtypeMismatch, or PositionOutOfRange if a token of this view was evicted, which is possible after a
        `truncate` (WIN-06).
        """
        query = accept_query(query, "num_queries", self.config.num_kv_heads, self.config.head_dim, self._backend)
        held, first = self._positions(), self._sight.first(self.length - 1)
        if max(first, self.config.sinks) < self._first and first < self.length:
            raise PositionOutOfRange(f"attend: position {first} is needed, positions before {self._first} were evicted")
        at = np.full(query.shape[0], self.length - 1)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(self._slots(held[start:stop]))

        return self._attended(query, at, read, held, scale)

    def read(self, positions: Sequence[int]) -> tuple[Array, Array]:
        """Return the keys and values at `positions`, in their order: float32 [n, num_kv_heads, head_dim] each (WIN-03).

        Positions are absolute: evicted tokens count. Raises PositionOutOfRange unless each is in `[0, length)` and stored.
        """
        wanted = np.array([in_range(each, self.length, PositionOutOfRange, "position") for each in positions], np.int64)
        for gone in wanted[(wanted >= self.config.sinks) & (wanted < self._first)]:
            raise PositionOutOfRange(f"position {gone} was evicted: sinks and positions from {self._first} on remain")
        return self._store.read(self._slots(wanted))

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length`, as if the others had never been appended (WIN-06).

        Raises PositionOutOfRange unless `length` is in `[0, self.length + 1)`, NotTruncatable if a query at position `length`
        sees a token that was evicted.
        """
        length, sinks = in_range(length, self.length + 1, PositionOutOfRange, "length"), self.config.sinks
        first = max(sinks, int(self._sight.first(length)))  # that a query at `length` sees, sink tokens aside
        if first < min(self._first, length):
            raise NotTruncatable(f"cannot truncate to {length}: its window starts at {first}, which was evicted")
        self.length, self._first = length, min(self._first, max(sinks, length))

    def clear(self) -> None:
        """Remove every token. The memory stays allocated."""
        self.truncate(0)

    def contents(self) -> Contents:
        """Describe what `save` writes: the stored tokens in order, and their positions."""
        state = {"length": self.length, "first": self._first}
        return Contents(
            "windowed", shape_of(self.config), state, key_and_value_spans("tokens", self._store, self._slots(self._positions()))
        )

    def _new_cache(self) -> "WindowedCache":
        return WindowedCache(self.config, self._backend)

    def _allocate_for(self, saved: SavedState) -> Sequence[TokenSpan]:
        self.length, self._first = saved.number("length"), saved.number("first")
        end = max(self.config.sinks, self.length)
        if not max(self.config.sinks, end - self._ring) <= self._first <= end:
            raise FileDamaged(f"file: first: expected one of the last {self._ring} of {end} positions, got {self._first}")
        return self.contents().spans

    def _accepted(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Keys and values as float32. Raises ShapeMismatch or DtypeMismatch."""
        return accept_pair(keys, values, ("n", self.config.num_kv_heads, self.config.head_dim), self._backend)

    def _positions(self) -> NDArray[np.int64]:
        """The positions of the stored tokens, in order."""
        return np.concatenate([np.arange(min(self.config.sinks, self.length)), np.arange(self._first, self.length)])

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of positions."""
        sinks = self.config.sinks
        return np.where(positions < sinks, positions, sinks + (positions - sinks) % self._ring)

    def _write(self, stored: tuple[Quantized, Quantized], count: int) -> None:
        """Append `count` quantized tokens."""
        end = self.length + count
        new = np.arange(self.length, end)
        stays = (new < self.config.sinks) | (new >= end - self._ring)  # if there are more than slots, the last ones
        slots = np.where(stays, self._slots(new), -1)  # negative slots are skipped (KERN-02)
        self._store.put(slots, stored)
        self.length, self._first = end, max(self._first, end - self._ring)

    def _attended(
        self, query: Array, at: NDArray[np.int64], read: Read, positions: NDArray[np.int64], scale: float | None
    ) -> Array:
        scale = 1 / math.sqrt(self.config.head_dim) if scale is None else scale
        return attended(query, at, read, positions, scale, self._sight, self._backend)
