"""The windowed cache: a ring of the last tokens, behind a few of the first that stay for ever.

Token p lies at slot p where it is one of the first `sinks`, and at sinks + (p - sinks) % ring otherwise, where the ring has a
slot for each token of the window, and for each that `truncate` may have to take back. A token that comes in overwrites the one
that left the window, so that what the first queries of a long step have to see is gone before its last token is written: `step`
attends first, over what was held and what comes, and writes afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Read, Sight, accept_query, attended
from kvref.backend import Backend, reference
from kvref.contents import Contents, Saved, Stretch, both, shape_of
from kvref.errors import FileDamaged, NotTruncatable, PositionOutOfRange, in_range, whole_fields
from kvref.formats import Quantized, get_format
from kvref.inputs import accept_pair
from kvref.slots import TokenStore
from kvref.transfer import Movable


@dataclass(frozen=True)
class WindowedConfig:
    """Sizes in tokens, heads and elements. window, sinks, chunk: what a query sees, as in `kvref.attention.Sight`; no chunk: 0.

    rollback: tokens that `truncate` can always take back, such as a draft that was rejected. dtype: how values are stored, in any
    format whose groups go into head_dim (WIN-10); a scale that would be given is 1.0.
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
        get_format(self.dtype).code_width(self.head_dim)  # which says whether it has groups of whole width


class WindowedCache(Movable):
    _moved = ("_store", "length", "_first")

    def __init__(self, config: WindowedConfig, backend: Backend = reference) -> None:
        self.config = config
        self.length = 0  # tokens that ever came, less what was truncated: the position of the next
        self._first = config.sinks  # the first position behind the sinks that the ring holds
        self._ring = config.window + config.rollback
        self._sight = Sight(config.window, config.sinks, config.chunk)
        self._backend = backend
        slots = config.sinks + self._ring
        self._store = TokenStore(backend, get_format(config.dtype), slots, config.num_kv_heads, config.head_dim)

    @property
    def stored_tokens(self) -> int:
        """Tokens that are held, at most sinks + window + rollback, whatever comes (WIN-04)."""
        return len(self._positions())

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [n, num_kv_heads, head_dim]. Raises ShapeMismatch, DtypeMismatch or NonFinite."""
        keys, values = self._accepted(keys, values)
        self._write(self._store.quantized(keys, values), keys.shape[0])

    def step(self, query: Array, keys: Array, values: Array, scale: float | None = None) -> Array:
        """Append n tokens, and what the query of each sees: float32 [n, num_query_heads, head_dim] (WIN-02).

        query [n, num_query_heads, head_dim]; keys and values [n, num_kv_heads, head_dim]. Raises ShapeMismatch, DtypeMismatch or
        NonFinite, with nothing appended.
        """
        keys, values = self._accepted(keys, values)
        query = accept_query(query, keys.shape[0], self.config.num_kv_heads, self.config.head_dim, self._backend)
        stored = self._store.quantized(keys, values)  # once: what is attended to is what is put into the slots (WIN-10)
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
        """What queries [num_queries, num_query_heads, head_dim] see that all stand where the newest token does.

        Raises ShapeMismatch, DtypeMismatch, and PositionOutOfRange where `truncate` left less than that token saw when it came.
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
        """Keys and values at `positions`, counted from the first token that ever came: float32 [n, num_kv_heads, head_dim].

        Raises PositionOutOfRange past the length, and for a token that is not held any more (WIN-03).
        """
        wanted = np.array([in_range(each, self.length, PositionOutOfRange, "position") for each in positions], np.int64)
        for gone in wanted[(wanted >= self.config.sinks) & (wanted < self._first)]:
            raise PositionOutOfRange(f"position {gone} was evicted: sinks and positions from {self._first} on remain")
        return self._store.read(self._slots(wanted))

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, as if the others had never come (WIN-06).

        Raises PositionOutOfRange for more than there are, and NotTruncatable where a token that was overwritten would be seen.
        """
        length, sinks = in_range(length, self.length + 1, PositionOutOfRange, "length"), self.config.sinks
        first = max(sinks, int(self._sight.first(length)))  # that a query at this position sees behind the sinks
        if first < min(self._first, length):
            raise NotTruncatable(f"cannot truncate to {length}: its window starts at {first}, which was evicted")
        self.length, self._first = length, min(self._first, max(sinks, length))

    def clear(self) -> None:
        """Forget every token; the memory stays."""
        self.truncate(0)

    def contents(self) -> Contents:
        """What is saved: the tokens that are held, oldest first, and which they are."""
        state = {"length": self.length, "first": self._first}
        return Contents("windowed", shape_of(self.config), state, both("tokens", self._store, self._slots(self._positions())))

    def _another(self) -> "WindowedCache":
        return WindowedCache(self.config, self._backend)

    def _make_room(self, saved: Saved) -> Sequence[Stretch]:
        self.length, self._first = saved.number("length"), saved.number("first")
        end = max(self.config.sinks, self.length)
        if not max(self.config.sinks, end - self._ring) <= self._first <= end:
            raise FileDamaged(f"file: first: expected one of the last {self._ring} of {end} positions, got {self._first}")
        return self.contents().stretches

    def _accepted(self, keys: Array, values: Array) -> tuple[Array, Array]:
        return accept_pair(keys, values, ("n", self.config.num_kv_heads, self.config.head_dim), self._backend)

    def _positions(self) -> NDArray[np.int64]:
        """Of the tokens that are held, oldest first."""
        return np.concatenate([np.arange(min(self.config.sinks, self.length)), np.arange(self._first, self.length)])

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        sinks = self.config.sinks
        return np.where(positions < sinks, positions, sinks + (positions - sinks) % self._ring)

    def _write(self, stored: tuple[Quantized, Quantized], count: int) -> None:
        end = self.length + count
        new = np.arange(self.length, end)
        stays = (new < self.config.sinks) | (new >= end - self._ring)  # of more than a ring the last
        slots = np.where(stays, self._slots(new), -1)  # a negative one is skipped (KERN-02)
        self._store.put(slots, stored)
        self.length, self._first = end, max(self._first, end - self._ring)

    def _attended(
        self, query: Array, at: NDArray[np.int64], read: Read, positions: NDArray[np.int64], scale: float | None
    ) -> Array:
        scale = 1 / math.sqrt(self.config.head_dim) if scale is None else scale
        return attended(query, at, read, positions, scale, self._sight, self._backend)
