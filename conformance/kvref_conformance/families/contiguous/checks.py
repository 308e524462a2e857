"""Checks of CONTIG: the contiguous cache, with buffers [batch_size, num_kv_heads, capacity, head_dim]."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, same, shaped
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, batch_major, formats_of, new, tokens
from kvref_conformance.checking.streams import same_observables
from kvref_conformance.conversation.calls import writable
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.contiguous.memory import as_stored, numbers
from kvref_conformance.families.contiguous.stream import ContiguousStream
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.outcome import NotOffered

Pair = tuple[NDArray, NDArray]
DTYPES = ("float32", "float16", "bfloat16")


def rows(subject: Subject, cache: Handle, count: int) -> Pair:
    """Returns random keys and values [batch, heads, count, dim] for a cache."""

    def one() -> NDArray:
        return np.concatenate([batch_major(tokens(subject, count)) for _ in range(cache.config["batch_size"])])

    return one(), one()


def filled(subject: Subject, count: int, **config: Any) -> tuple[Handle, NDArray, NDArray]:
    cache = new(subject, "contiguous", **config)
    at_least(cache, max_seq_len=count)
    keys, values = rows(subject, cache, count)
    cache.append(keys, values)
    return cache, keys, values


def joined(before: Pair, more: Pair) -> Pair:
    """Concatenates two pairs of keys and values along the token axis."""
    return np.concatenate([before[0], more[0]], axis=2), np.concatenate([before[1], more[1]], axis=2)


def growing(subject: Subject, *sizes: tuple[int, int]) -> Iterator[tuple[Handle, int, int]]:
    """Yields new caches with (initial_capacity, max_seq_len) near each of `sizes`, and the two sizes that they have.

    Raises NotOffered if the limits permit no cache that grows.
    """
    grew = False
    for initial, most in sizes:
        cache = new(subject, "contiguous", initial_capacity=initial, max_seq_len=most)
        initial, most = cache.config["initial_capacity"], cache.config["max_seq_len"]
        if initial < most:
            grew = True
            yield cache, initial, most
    if not grew:
        raise NotOffered("a cache that grows, where its limits allow only initial capacities of the full size")


def with_room(subject: Subject, count: int) -> tuple[Handle, Pair, int]:
    """Returns a cache with an initial capacity near `count`, its tokens, and how many more fit before it grows."""
    cache, keys, values = filled(subject, 1, initial_capacity=count)
    while (room := _capacity(cache) - cache.seq_len) < 1:
        if cache.capacity == cache.config["max_seq_len"]:
            raise NotOffered("room for two tokens")
        more = rows(subject, cache, 1)
        cache.append(*more)
        keys, values = joined((keys, values), more)
    return cache, (keys, values), room


def _capacity(cache: Handle) -> int:
    """Returns the capacity that it reports, or a lower bound if it reports none."""
    try:
        return int(cache.capacity)
    except NotOffered:
        return max(int(cache.config["initial_capacity"]), int(cache.seq_len))


@check("CONTIG-01a", "contiguous")
def a_new_cache_is_empty(subject: Subject) -> None:
    equal(new(subject, "contiguous").seq_len, 0, "length of a new cache")


@check("CONTIG-01b", "contiguous")
def a_new_cache_has_its_initial_capacity(subject: Subject) -> None:
    for wanted, limit in ((3, 20), (0, 20), (50, 20)):
        cache = new(subject, "contiguous", initial_capacity=wanted, max_seq_len=limit)
        initial, most = cache.config["initial_capacity"], cache.config["max_seq_len"]
        what = f"capacity of a new cache with initial_capacity {initial}, max_seq_len {most}"
        equal(cache.capacity, min(initial, most), what)


@check("CONTIG-02", "contiguous")
def tokens_are_read_in_order(subject: Subject) -> None:
    subject.need(max_seq_len=12)
    cache, at = new(subject, "contiguous"), 0
    keys, values = rows(subject, cache, 12)
    for count in (1, 4, 1, 1, 5):
        part = slice(at, at + count)
        cache.append(keys[:, :, part], values[:, :, part])
        at += count
        equal(cache.seq_len, at, "length")
        pair(cache.read(), (keys[:, :, :at], values[:, :, :at]), f"the tokens after appends of {at}")


@check("CONTIG-03", "contiguous")
def an_empty_cache_reads_as_no_tokens(subject: Subject) -> None:
    for batch in (1, 2):
        cache = new(subject, "contiguous", batch_size=batch)
        pair(cache.read(), rows(subject, cache, 0), "a new cache")


@check("CONTIG-03", "contiguous")
def a_cache_given_no_tokens_reads_as_none(subject: Subject) -> None:
    cache, keys, values = filled(subject, 0)
    pair(cache.read(), (keys, values), "a cache after an append of 0 tokens")


@check("CONTIG-04", "contiguous")
def capacity_doubles_until_it_fits(subject: Subject) -> None:
    """Appends one token more than fit, more than twice as many, and up to the maximum, which no doubling reaches."""
    for at_once in (False, True):
        for cache, initial, most in growing(subject, (0, 20), (3, 20), (2, 100), (5, 7)):
            first = max(1, initial)
            capacity, length = initial, 0
            for total in (8 * first + 1, most - 1) if at_once else (first, first + 1, 2 * first + 1, 6 * first, most - 1):
                if length < total < most:
                    cache.append(*rows(subject, cache, total - length))
                    length = total
                    while capacity < total:
                        capacity = min(max(1, 2 * capacity), most)
                    equal(cache.capacity, capacity, f"capacity at {total} tokens, {initial} at first, at most {most}")


@check("CONTIG-05", "contiguous")
def growing_keeps_every_bit(subject: Subject) -> None:
    for cache, initial, most in growing(subject, (0, 20), (1, 20), (3, 20)):
        at_a_time = max(2, initial // 2)  # so that it grows more than once
        held = rows(subject, cache, 0)
        for _ in range(9):
            more = rows(subject, cache, min(at_a_time, most - held[0].shape[2]))
            if not more[0].size:
                break
            cache.append(*more)
            held = joined(held, more)
            pair(cache.read(), held, f"{held[0].shape[2]} tokens")


@check("CONTIG-06ab", "contiguous")
def full_is_full(subject: Subject) -> None:
    cache = new(subject, "contiguous")
    most = cache.config["max_seq_len"]
    keys, values = rows(subject, cache, most)
    cache.append(keys, values)
    equal(cache.seq_len, most, "length of a cache filled to max_seq_len")
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, cache, 1))
    equal(cache.seq_len, most, "length of a full cache after a rejected append")
    pair(cache.read(), (keys, values), "a full cache after a rejected append")


@check("CONTIG-06b", "contiguous")
def what_does_not_fit_does_not_grow(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)
    capacity = cache.capacity
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, cache, cache.config["max_seq_len"] - 1))
    equal((cache.seq_len, cache.capacity), (2, capacity), "length and capacity after an append that did not fit")
    pair(cache.read(), (keys, values), "a cache after an append that did not fit")


@check("CONTIG-07b", "contiguous")
def raw_buffers_hold_the_tokens(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, keys, values = filled(subject, 4, dtype=dtype)
        for got, want in zip(cache.as_is("raw"), (keys, values), strict=True):
            used = shaped(subject.numpy(got)[:, :, :4], want.shape, "the used part of the raw buffer")
            same(numbers(used, dtype), round_to(want, dtype), f"the first 4 tokens of the raw {dtype} buffer")


@check("CONTIG-07a", "contiguous")
def raw_buffers_have_the_caches_capacity(subject: Subject) -> None:
    cache, keys, _ = filled(subject, 4)
    batch, heads, _, dim = keys.shape
    for buffer in cache.raw():
        shaped(buffer, (batch, heads, cache.capacity, dim), "the raw buffer")


@check("CONTIG-08", "contiguous")
def raw_buffers_stay_the_same_memory(subject: Subject) -> None:
    subject.in_this_process()
    cache, (keys, values), room = with_room(subject, 8)
    dtype, before = cache.config["dtype"], cache.as_is("raw")[0]
    writable(before, "raw buffers that can be written to")
    for count in (room // 3, room // 3, room - 2 * (room // 3)):  # up to the capacity
        more = rows(subject, cache, count)
        if count:
            cache.append(*more)
            keys, values = joined((keys, values), more)
    seen = numbers(subject.numpy(before), dtype)
    same(seen[:, :, : keys.shape[2]], keys, "raw keys that were returned before three appends")
    cache.reset()
    cache.append(*more)
    seen = numbers(subject.numpy(before), dtype)
    same(seen[:, :, : more[0].shape[2]], more[0], "raw keys that were returned before reset and append")


@check("CONTIG-09", "contiguous")
def a_fused_append_is_an_append(subject: Subject) -> None:
    plain, fused = ContiguousStream(subject), ContiguousStream(subject)
    for count in (2, 1, 5):
        keys, values = rows(subject, plain.cache, count)
        plain.cache.append(keys, values)
        fused.cache.append_fused(np.stack([keys, values]))
        same_observables(fused.observe(), plain.observe(), "after a fused append")
        pair(fused.cache.read(), plain.cache.read(), "tokens after a fused append")


@check("CONTIG-10a", "contiguous")
def advancing_makes_tokens_readable(subject: Subject) -> None:
    subject.in_this_process()
    cache, held, room = with_room(subject, 5)
    length, more = held[0].shape[2], rows(subject, cache, room)
    for buffer, new_rows in zip(cache.as_is("raw"), more, strict=True):
        writable(buffer, "raw buffers that can be written to")
        own = subject.own(as_stored(new_rows, subject.numpy(buffer), cache.config["dtype"]))
        buffer[:, :, length : length + room, :] = own.array
    cache.advance(room)
    equal(cache.seq_len, length + room, f"length after advance({room}) at {length}")
    pair(cache.read(), joined(held, more), f"tokens after advance({room})")


@check("CONTIG-10b", "contiguous")
def advancing_past_capacity_raises(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)  # capacity 3 and max_seq_len 20, if the limits allow it
    with raises("CapacityExceeded"):
        cache.advance(cache.capacity - 1)
    equal(cache.seq_len, 2, "length after a rejected advance past capacity")
    pair(cache.read(), (keys, values), "tokens after a rejected advance past capacity")


@check("CONTIG-10c", "contiguous")
def advancing_by_less_than_nothing_raises(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)
    with raises("PositionOutOfRange"):
        cache.advance(-1)
    pair(cache.read(), (keys, values), "tokens after a rejected advance by a negative number")


@check("CONTIG-11a", "contiguous")
def a_reset_keeps_capacity(subject: Subject) -> None:
    cache, _, _ = filled(subject, 7)
    capacity = cache.capacity
    cache.reset()
    equal(cache.capacity, capacity, "capacity after reset")


@check("CONTIG-11b", "contiguous")
def a_reset_forgets(subject: Subject) -> None:
    cache, _, _ = filled(subject, 7)
    cache.reset()
    equal(cache.seq_len, 0, "length after reset")
    pair(cache.read(), rows(subject, cache, 0), "a cache after reset")
    keys, values = rows(subject, cache, 2)
    cache.append(keys, values)
    pair(cache.read(), (keys, values), "2 tokens appended after reset")


@check("CONTIG-12", "contiguous")
def values_are_stored_in_the_caches_dtype(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, keys, values = filled(subject, 5, dtype=dtype)
        pair(cache.read(), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("CONTIG-13", "contiguous")
def sequences_of_a_batch_are_independent(subject: Subject) -> None:
    subject.need(batch_size=2)
    cache, keys, values = filled(subject, 4, batch_size=3)
    at_least(cache, max_seq_len=7)
    more = rows(subject, cache, 3)
    more[0][1], more[1][1] = 0, 0  # the second sequence's tokens are zero
    cache.append(*more)
    pair(cache.read(), joined((keys, values), more), f"a batch of {len(keys)}")
