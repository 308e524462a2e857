"""Wrong windowed and contiguous caches."""

from typing import Any

import numpy as np
import pytest

from kvref import ContiguousCache, ContiguousConfig, WindowedCache, WindowedConfig
from kvref.errors import NotTruncatable
from wrong_designs.design import NUMPY, around, design, observe, rows


def windowed(*values: float, **changes: Any) -> Any:
    """A windowed cache with these tokens."""
    cache = WindowedCache(WindowedConfig(**({"num_kv_heads": 1, "head_dim": 1, "window": 3} | changes)), NUMPY)
    cache.append(rows(*values), rows(*values))
    return cache


def add(cache: Any, *values: float) -> None:
    """Append tokens to a windowed cache."""
    cache.append(rows(*values), rows(*values))


def every_read(cache: Any) -> Any:
    """What each position reads as."""
    return [observe(cache.read, [position]) for position in range(cache.length)]


def _append_after_rollback() -> Any:
    cache = windowed(*range(10), rollback=3)
    cache.truncate(7)
    add(cache, 77)
    return every_read(cache)


@design("windowed", "WIN-03", _append_after_rollback)
def the_ring_forgets_what_a_draft_overwrote(patch: pytest.MonkeyPatch) -> None:
    """After a truncated draft, the next append declares all slots of the ring to be the newest tokens, overwritten ones too."""

    @around(patch, WindowedCache, "_write")
    def write(original: Any, self: Any, stored: Any, count: int) -> None:
        original(self, stored, count)
        self._first = max(self.config.sinks, self.length - self._ring)


def _load_after_rollback() -> Any:
    cache, target = windowed(*range(10), rollback=3), windowed(rollback=3)
    cache.truncate(7)
    target.load(cache.save())
    return every_read(target), observe(target.truncate, 5)


@design("windowed", "MOVE-01", _load_after_rollback)
def load_assumes_a_full_ring(patch: pytest.MonkeyPatch) -> None:
    """A file does not say which tokens the ring had: after a truncated draft, the loaded cache returns slots without a token."""

    @around(patch, WindowedCache, "receive")
    def receive(original: Any, self: Any, file: Any) -> None:
        original(self, file)
        self._first = max(self.config.sinks, self.length - self._ring)


def _short_of_sinks() -> Any:
    cache = windowed(1, 2, 3, sinks=3)
    cache.truncate(1)
    add(cache, 5, 6, 7)
    return cache.attend(rows(0)), cache.stored_tokens


@design("windowed", "WIN-06", _short_of_sinks)
def truncating_into_the_sinks_stores_them_twice(patch: pytest.MonkeyPatch) -> None:
    """After a truncation below `sinks` the ring begins at the new length, so that later sink tokens are in both parts."""

    @around(patch, WindowedCache, "truncate")
    def truncate(original: Any, self: Any, length: int) -> None:
        original(self, length)
        self._first = min(self._first, self.length)


def _exactly_the_ring() -> Any:
    cache = windowed(1)
    add(cache, 2, 3, 4)
    add(cache, 5)
    return every_read(cache)


@design("windowed", "WIN-03", _exactly_the_ring)
def an_append_of_the_whole_ring_starts_at_slot_0(patch: pytest.MonkeyPatch) -> None:
    """If an append has exactly as many tokens as the ring has slots, it replaces the ring without rotating the tokens."""

    @around(patch, WindowedCache, "_write")
    def write(original: Any, self: Any, stored: Any, count: int) -> None:
        start = self.length
        original(self, stored, count)
        if count == self._ring and start >= self.config.sinks:
            self._store.put(self.config.sinks + np.arange(count), stored)


def _nothing_evicted() -> Any:
    cache = windowed(1, 2, window=8)
    return observe(cache.truncate, 1), cache.length


@design("windowed", "WIN-06", _nothing_evicted)
def truncate_works_for_the_rollback_only(patch: pytest.MonkeyPatch) -> None:
    """`truncate` is refused past `rollback` tokens although the ring was never full."""

    @around(patch, WindowedCache, "truncate")
    def truncate(original: Any, self: Any, length: int) -> None:
        if 0 < length < self.length - self.config.rollback:
            raise NotTruncatable("past the rollback")
        original(self, length)


def _chunk_and_rollback() -> Any:
    cache = windowed(*range(6), window=3, chunk=2, rollback=2)
    cache.truncate(4)
    return cache.attend(rows(0))


@design("windowed", "WIN-06", _chunk_and_rollback)
def attend_after_truncate_uses_the_next_chunk(patch: pytest.MonkeyPatch) -> None:
    """After a truncation to the beginning of a chunk, `attend` uses the view of the next query, which sees no token yet."""

    @around(patch, WindowedCache, "truncate")
    def truncate(original: Any, self: Any, length: int) -> None:
        shorter = length < self.length
        original(self, length)
        self._truncated = shorter

    @around(patch, WindowedCache, "_write")
    def write(original: Any, self: Any, stored: Any, count: int) -> None:
        original(self, stored, count)
        self._truncated = False

    @around(patch, WindowedCache, "_attended")
    def attended(original: Any, self: Any, query: Any, at: Any, *rest: Any) -> Any:
        late = self.__dict__.get("_truncated") and self.config.chunk and len(at) and at[0] == self.length - 1
        return original(self, query, at + 1 if late else at, *rest)


def contiguous(**changes: Any) -> Any:
    """A contiguous cache."""
    sizes = {"num_kv_heads": 1, "head_dim": 1, "max_seq_len": 8, "initial_capacity": 4}
    return ContiguousCache(ContiguousConfig(**(sizes | changes)), NUMPY)


def lanes(*values: list[float]) -> Any:
    """Tokens of a batch: one list per sequence."""
    return np.array(values, np.float32)[:, None, :, None]


def _ascending_rows() -> Any:
    cache = contiguous(batch_size=3)
    cache.append(lanes([1], [2], [3]), lanes([1], [2], [3]))
    cache.reorder([0, 0, 1])
    return cache.read()[0]


@design("contiguous", "EDIT-07", _ascending_rows)
def reorder_is_in_place_for_ascending_rows(patch: pytest.MonkeyPatch) -> None:
    """Ascending rows are copied one by one in place, which is right only if no row is read after it was overwritten."""

    @around(patch, ContiguousCache, "reorder")
    def reorder(original: Any, self: Any, chosen: Any) -> None:
        found = [int(row) for row in chosen]
        if len(found) == self.config.batch_size and found == sorted(found) and all(0 <= row < len(found) for row in found):
            for buffer in (self._keys, self._values):
                for target, source in enumerate(found):
                    buffer[target] = buffer[source]
            return
        original(self, chosen)


def _first_append_after_reset() -> Any:
    cache, new = contiguous(), rows(1, 2, 3, 4).reshape(1, 1, 4, 1)
    cache.append(new[:, :, :1], new[:, :, :1])
    cache.reset()
    cache.append(new, new)
    new[...] = 9
    return cache.read()[0]


@design("contiguous", "LAW-08", _first_append_after_reset)
def a_prompt_that_fills_the_reset_buffer_is_adopted(patch: pytest.MonkeyPatch) -> None:
    """After `reset`, an append of exactly `capacity` tokens becomes the buffer, and the caller's array is not copied."""

    @around(patch, ContiguousCache, "reset")
    def reset(original: Any, self: Any) -> None:
        original(self)
        self._was_reset = True

    @around(patch, ContiguousCache, "append")
    def append(original: Any, self: Any, new_keys: Any, new_values: Any) -> None:
        empty = not self.seq_len
        original(self, new_keys, new_values)
        fills = self.__dict__.pop("_was_reset", False) and empty and self.seq_len == self.capacity
        stored_as_given = all(getattr(each, "dtype", None) == self._keys.dtype == np.float32 for each in (new_keys, new_values))
        if fills and stored_as_given:
            self._keys, self._values = new_keys, new_values


def _advance_again() -> Any:
    cache = contiguous(dtype="float16")
    cache.append(lanes([1, 2]), lanes([1, 2]))
    cache.read()
    cache.truncate(1)
    cache.raw()[0][:, :, 1] = 7
    cache.advance(1)
    return cache.read()[0]


@design("contiguous", "CONTIG-10", _advance_again)
def a_widened_read_is_cached_by_length(patch: pytest.MonkeyPatch) -> None:
    """A float16 cache keeps its last float32 copy until an append, although a kernel can write another token in between."""

    @around(patch, ContiguousCache, "read")
    def read(original: Any, self: Any) -> Any:
        if self.config.dtype == "float32":
            return original(self)
        length, copy = self.__dict__.get("_copy", (None, None))
        if length != self.seq_len:
            copy = original(self)
            self._copy = self.seq_len, copy
        return copy

    for name in ("append", "reorder"):

        @around(patch, ContiguousCache, name)
        def change(original: Any, self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            self.__dict__.pop("_copy", None)


def _small_integer() -> Any:
    cache = contiguous(max_seq_len=300)
    cache.append(rows(*range(101)).reshape(1, 1, -1, 1), rows(*range(101)).reshape(1, 1, -1, 1))
    cache.truncate(np.int8(100))
    with np.errstate(over="ignore"):
        return observe(cache.append, *[rows(*range(100)).reshape(1, 1, -1, 1)] * 2), int(cache.seq_len)


@design("contiguous", "LAW-20", _small_integer)
def truncate_keeps_the_integer_type(patch: pytest.MonkeyPatch) -> None:
    """The length is stored as it was passed: an int8 overflows in a later append."""

    @around(patch, ContiguousCache, "truncate")
    def truncate(original: Any, self: Any, length: Any) -> None:
        original(self, length)
        self.seq_len = length


def _fused_pair() -> Any:
    cache = contiguous(batch_size=2)
    cache.append_fused(np.array([1, 2, 3, 4], np.float32).reshape(2, 2, 1, 1, 1))
    return cache.read()


@design("contiguous", "CONTIG-09", _fused_pair)
def append_fused_finds_its_axis_by_size(patch: pytest.MonkeyPatch) -> None:
    """The axis of keys and values is recognized by its size 2: in a batch of two sequences it is confused with the batch."""

    @around(patch, ContiguousCache, "append_fused")
    def append_fused(original: Any, self: Any, key_values: Any) -> None:
        both = np.ndim(key_values) == 5 and self.config.batch_size == 2
        original(self, np.swapaxes(key_values, 0, 1) if both else key_values)


def _reorder_then_grow() -> Any:
    cache = contiguous(batch_size=2, initial_capacity=2)
    cache.append(lanes([1, 2], [3, 4]), lanes([1, 2], [3, 4]))
    cache.reorder([1, 0])
    cache.append(lanes([5], [6]), lanes([5], [6]))
    return cache.read()[0]


@design("contiguous", "EDIT-07", _reorder_then_grow)
def a_delayed_reorder_is_lost_by_growth(patch: pytest.MonkeyPatch) -> None:
    """`reorder` copies rows at the next read; an append that enlarges the buffers before that copies the old rows."""

    @around(patch, ContiguousCache, "reorder")
    def reorder(original: Any, self: Any, chosen: Any) -> None:
        self._before = None if len(chosen) != self.config.batch_size else (self._keys.copy(), self._values.copy())
        original(self, chosen)

    for name in ("read", "attend", "raw", "truncate", "reset", "advance"):

        @around(patch, ContiguousCache, name)
        def settle(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
            self._before = None
            return original(self, *arguments, **options)

    @around(patch, ContiguousCache, "_grow")
    def grow(original: Any, self: Any, needed: int) -> None:
        if self.__dict__.get("_before"):
            self._keys, self._values = self._before
        original(self, needed)
