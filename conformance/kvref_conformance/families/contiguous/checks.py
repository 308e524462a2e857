"""Conversion of the raw buffers of a cache. If an array library lacks a dtype, a buffer contains its codes as integers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.recorder import writable
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.contiguous.law_adapter import ContiguousLawAdapter
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import CODED
from kvref_conformance.oracle.formats.small_floats import decoded, encode, round_to
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_same, raises, shaped
from kvref_conformance.testlib.fixtures import (
    at_least,
    batch_major,
    clamp_to_limits,
    formats_of,
    new,
    pair_of_tokens,
    random_tokens,
)
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.law_adapter import same_observables
from kvref_conformance.testlib.production_sizes import affordable, edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, belongs, pair_of_content


def numbers(buffer: NDArray, dtype: str) -> NDArray:
    """Returns the numbers in a buffer of this dtype, as float32 if the buffer contains codes."""
    return decoded(dtype)[buffer] if _codes(buffer, dtype) else buffer


def as_stored(rows: NDArray, buffer: NDArray, dtype: str) -> NDArray:
    """Returns `rows` as they are written into a buffer of this dtype."""
    return encode(rows, dtype).astype(buffer.dtype) if _codes(buffer, dtype) else rows


def _codes(buffer: NDArray, dtype: str) -> bool:
    return dtype in CODED and buffer.dtype.kind in "iu"


# Checks of CONTIG: the contiguous cache, with buffers [batch_size, num_kv_heads, capacity, head_dim].

Pair = tuple[NDArray, NDArray]
DTYPES = ("float32", "float16", "bfloat16")


def rows(subject: Subject, cache: ObjectProxy, count: int) -> Pair:
    """Returns random keys and values [batch, heads, count, dim] for a cache."""

    def one() -> NDArray:
        return np.concatenate([batch_major(random_tokens(subject, count)) for _ in range(cache.config["batch_size"])])

    return one(), one()


def filled(subject: Subject, count: int, **config: Any) -> tuple[ObjectProxy, NDArray, NDArray]:
    cache = new(subject, "contiguous", **config)
    at_least(cache, max_seq_len=count)
    keys, values = rows(subject, cache, count)
    cache.append(keys, values)
    return cache, keys, values


def joined(before: Pair, more: Pair) -> Pair:
    """Concatenates two pairs of keys and values along the token axis."""
    return np.concatenate([before[0], more[0]], axis=2), np.concatenate([before[1], more[1]], axis=2)


def growing(subject: Subject, *sizes: tuple[int, int]) -> Iterator[tuple[ObjectProxy, int, int]]:
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


def with_room(subject: Subject, count: int) -> tuple[ObjectProxy, Pair, int]:
    """Returns a cache with an initial capacity near `count`, its tokens, and how many more fit before it grows."""
    cache, keys, values = filled(subject, 1, initial_capacity=count)
    while (room := _capacity(cache) - cache.seq_len) < 1:
        if cache.capacity == cache.config["max_seq_len"]:
            raise NotOffered("room for two tokens")
        more = rows(subject, cache, 1)
        cache.append(*more)
        keys, values = joined((keys, values), more)
    return cache, (keys, values), room


def _capacity(cache: ObjectProxy) -> int:
    """Returns the capacity that it reports, or a lower bound if it reports none."""
    try:
        return int(cache.capacity)
    except NotOffered:
        return max(int(cache.config["initial_capacity"]), int(cache.seq_len))


@check("CONTIG-01a", "contiguous")
def a_new_cache_is_empty(subject: Subject) -> None:
    assert_equal(new(subject, "contiguous").seq_len, 0, "length of a new cache")


@check("CONTIG-01b", "contiguous")
def a_new_cache_has_its_initial_capacity(subject: Subject) -> None:
    for wanted, limit in ((3, 20), (0, 20), (50, 20)):
        cache = new(subject, "contiguous", initial_capacity=wanted, max_seq_len=limit)
        initial, most = cache.config["initial_capacity"], cache.config["max_seq_len"]
        what = f"capacity of a new cache with initial_capacity {initial}, max_seq_len {most}"
        assert_equal(cache.capacity, min(initial, most), what)


@check("CONTIG-02", "contiguous")
def tokens_are_read_in_order(subject: Subject) -> None:
    subject.need(max_seq_len=12)
    cache, at = new(subject, "contiguous"), 0
    keys, values = rows(subject, cache, 12)
    for count in (1, 4, 1, 1, 5):
        part = slice(at, at + count)
        cache.append(keys[:, :, part], values[:, :, part])
        at += count
        assert_equal(cache.seq_len, at, "length")
        assert_pair(cache.read(), (keys[:, :, :at], values[:, :, :at]), f"the tokens after appends of {at}")


@check("CONTIG-03", "contiguous")
def an_empty_cache_reads_as_no_tokens(subject: Subject) -> None:
    for batch in (1, 2):
        cache = new(subject, "contiguous", batch_size=batch)
        assert_pair(cache.read(), rows(subject, cache, 0), "a new cache")


@check("CONTIG-03", "contiguous")
def a_cache_given_no_tokens_reads_as_none(subject: Subject) -> None:
    cache, keys, values = filled(subject, 0)
    assert_pair(cache.read(), (keys, values), "a cache after an append of 0 tokens")


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
                    assert_equal(cache.capacity, capacity, f"capacity at {total} tokens, {initial} at first, at most {most}")


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
            assert_pair(cache.read(), held, f"{held[0].shape[2]} tokens")


@check("CONTIG-06ab", "contiguous")
def full_is_full(subject: Subject) -> None:
    cache = new(subject, "contiguous")
    most = cache.config["max_seq_len"]
    keys, values = rows(subject, cache, most)
    cache.append(keys, values)
    assert_equal(cache.seq_len, most, "length of a cache filled to max_seq_len")
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, cache, 1))
    assert_equal(cache.seq_len, most, "length of a full cache after a rejected append")
    assert_pair(cache.read(), (keys, values), "a full cache after a rejected append")


@check("CONTIG-06b", "contiguous")
def what_does_not_fit_does_not_grow(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)
    capacity = cache.capacity
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, cache, cache.config["max_seq_len"] - 1))
    assert_equal((cache.seq_len, cache.capacity), (2, capacity), "length and capacity after an append that did not fit")
    assert_pair(cache.read(), (keys, values), "a cache after an append that did not fit")


@check("CONTIG-07b", "contiguous")
def raw_buffers_hold_the_tokens(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, keys, values = filled(subject, 4, dtype=dtype)
        for got, want in zip(cache.as_is("raw"), (keys, values), strict=True):
            used = shaped(subject.numpy(got)[:, :, :4], want.shape, "the used part of the raw buffer")
            assert_same(numbers(used, dtype), round_to(want, dtype), f"the first 4 tokens of the raw {dtype} buffer")


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
    assert_same(seen[:, :, : keys.shape[2]], keys, "raw keys that were returned before three appends")
    cache.reset()
    cache.append(*more)
    seen = numbers(subject.numpy(before), dtype)
    assert_same(seen[:, :, : more[0].shape[2]], more[0], "raw keys that were returned before reset and append")


@check("CONTIG-09", "contiguous")
def a_fused_append_is_an_append(subject: Subject) -> None:
    plain, fused = ContiguousLawAdapter(subject), ContiguousLawAdapter(subject)
    for count in (2, 1, 5):
        keys, values = rows(subject, plain.cache, count)
        plain.cache.append(keys, values)
        fused.cache.append_fused(np.stack([keys, values]))
        same_observables(fused.observe(), plain.observe(), "after a fused append")
        assert_pair(fused.cache.read(), plain.cache.read(), "tokens after a fused append")


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
    assert_equal(cache.seq_len, length + room, f"length after advance({room}) at {length}")
    assert_pair(cache.read(), joined(held, more), f"tokens after advance({room})")


@check("CONTIG-10b", "contiguous")
def advancing_past_capacity_raises(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)  # capacity 3 and max_seq_len 20, if the limits allow it
    with raises("CapacityExceeded"):
        cache.advance(cache.capacity - 1)
    assert_equal(cache.seq_len, 2, "length after a rejected advance past capacity")
    assert_pair(cache.read(), (keys, values), "tokens after a rejected advance past capacity")


@check("CONTIG-10c", "contiguous")
def advancing_by_less_than_nothing_raises(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)
    with raises("PositionOutOfRange"):
        cache.advance(-1)
    assert_pair(cache.read(), (keys, values), "tokens after a rejected advance by a negative number")


@check("CONTIG-11a", "contiguous")
def a_reset_keeps_capacity(subject: Subject) -> None:
    cache, _, _ = filled(subject, 7)
    capacity = cache.capacity
    cache.reset()
    assert_equal(cache.capacity, capacity, "capacity after reset")


@check("CONTIG-11b", "contiguous")
def a_reset_forgets(subject: Subject) -> None:
    cache, _, _ = filled(subject, 7)
    cache.reset()
    assert_equal(cache.seq_len, 0, "length after reset")
    assert_pair(cache.read(), rows(subject, cache, 0), "a cache after reset")
    keys, values = rows(subject, cache, 2)
    cache.append(keys, values)
    assert_pair(cache.read(), (keys, values), "2 tokens appended after reset")


@check("CONTIG-12", "contiguous")
def values_are_stored_in_the_caches_dtype(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, keys, values = filled(subject, 5, dtype=dtype)
        assert_pair(cache.read(), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("CONTIG-13", "contiguous")
def sequences_of_a_batch_are_independent(subject: Subject) -> None:
    subject.need(batch_size=2)
    cache, keys, values = filled(subject, 4, batch_size=3)
    at_least(cache, max_seq_len=7)
    more = rows(subject, cache, 3)
    more[0][1], more[1][1] = 0, 0  # the second sequence's tokens are zero
    cache.append(*more)
    assert_pair(cache.read(), joined((keys, values), more), f"a batch of {len(keys)}")


# Checks of EDIT for the contiguous cache: `truncate` and `reorder`.


def leading(given: Pair, length: int, dtype: str) -> Pair:
    """Returns what the first `length` of these tokens read as."""
    keys, values = (round_to(part[:, :, :length], dtype) for part in given)
    return keys, values


def holds(cache: ObjectProxy, given: Pair, length: int, when: str) -> None:
    """Raises Broken unless the cache contains exactly the first `length` of these tokens."""
    assert_equal(cache.seq_len, length, f"length {when}")
    assert_pair(cache.read(), leading(given, length, cache.config["dtype"]), f"tokens {when}")


@check("EDIT-01ac", "contiguous")
def the_first_tokens_stay(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, *given = filled(subject, 7, dtype=dtype)
        for length in (6, 3, 2, 0):
            cache.truncate(length)
            holds(cache, (given[0], given[1]), length, f"of a {dtype} cache after truncate({length})")


@check("EDIT-01d", "contiguous")
def memory_stays_when_tokens_go(subject: Subject) -> None:
    cache, keys, _ = filled(subject, 7)
    capacity = cache.capacity
    cache.truncate(2)
    assert_equal(cache.capacity, capacity, "capacity after truncate(2)")
    assert_same(numbers(cache.raw()[0][:, :, :2], cache.config["dtype"]), keys[:, :, :2], "the first 2 tokens of the raw buffer")
    cache.truncate(0)
    assert_equal(cache.capacity, capacity, "capacity after truncate(0)")


@check("EDIT-01d", "contiguous")
def raw_buffers_stay_the_same_memory_when_tokens_go(subject: Subject) -> None:
    subject.in_this_process()
    cache, _, _ = filled(subject, 7)
    before = cache.as_is("raw")[0]
    writable(before, "raw buffers that can be written to")
    cache.truncate(2)
    more = rows(subject, cache, 1)
    cache.append(*more)
    seen = numbers(subject.numpy(before), cache.config["dtype"])
    assert_same(seen[:, :, 2:3], more[0], "the key at position 2 of the buffer that raw returned before truncate and append")


@check("EDIT-02a", "contiguous")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    cache, *given = filled(subject, 5)
    most = cache.config["max_seq_len"]
    for length in subject.integers(6, max(6, most), most + 1, -1, -5, -6):
        with raises("PositionOutOfRange"):
            cache.truncate(length)
        holds(cache, (given[0], given[1]), 5, f"after a rejected truncate({length}) of 5 tokens")


@check("EDIT-02b", "contiguous")
def as_many_tokens_as_there_are_may_stay(subject: Subject) -> None:
    cache, *given = filled(subject, 5)
    cache.truncate(5)
    holds(cache, (given[0], given[1]), 5, "after truncate(5) of 5 tokens")
    cache.truncate(3)
    cache.truncate(3)
    holds(cache, (given[0], given[1]), 3, "after truncate(3), twice")
    empty = new(subject, "contiguous")
    empty.truncate(0)
    assert_equal(empty.seq_len, 0, "length of a new cache after truncate(0)")


@check("EDIT-03", "contiguous")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, *given = filled(subject, 4, dtype=dtype)
        held: Pair = given[0], given[1]
        for draft, length, more in ((3, 4, 1), (1, 3, 2), (2, 0, 6), (2, 7, 5)):  # the last removes one older token
            at_least(cache, max_seq_len=12)
            drafted = rows(subject, cache, draft)
            cache.append(*drafted)
            held = joined(held, drafted)
            cache.truncate(length)
            new_rows = rows(subject, cache, more)
            cache.append(*new_rows)
            held = joined((held[0][:, :, :length], held[1][:, :, :length]), new_rows)
            holds(cache, held, length + more, f"of a {dtype} cache after a draft of {draft}, truncate({length}), append({more})")


@check("EDIT-03", "contiguous")
def a_cache_that_went_back_is_filled_as_any_other(subject: Subject) -> None:
    cache = new(subject, "contiguous")
    at_least(cache, max_seq_len=2)
    most = cache.config["max_seq_len"]
    cache.append(*rows(subject, cache, most))
    cache.truncate(1)
    kept = cache.read()
    given = rows(subject, cache, most - 1)
    cache.append(*given)
    holds(cache, joined((kept[0], kept[1]), given), most, "of a full cache after truncate(1) and appends up to max_seq_len")
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, cache, 1))


def batched(subject: Subject, count: int, dtype: str | None = None) -> tuple[ObjectProxy, Pair]:
    """Returns a cache with several rows of different tokens, and the tokens."""
    subject.need(batch_size=2)
    cache, keys, values = filled(subject, count, batch_size=3, **{"dtype": dtype} if dtype else {})
    return cache, (keys, values)


def taken(given: Pair, which: Sequence[int]) -> Pair:
    return given[0][list(which)], given[1][list(which)]


def orders(batch: int) -> list[list[int]]:
    """Returns arguments of `reorder` that keep the batch size: rotate, swap, one row everywhere, leave one out, none."""
    every = list(range(batch))
    return [
        every[1:] + every[:1],
        [*every[:-2], every[-1], every[-2]],
        [batch - 1] * batch,
        [every[-1], *every[:-1]][:batch],
        every,
    ]


@check("EDIT-07a", "contiguous")
def rows_become_what_others_were(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, given = batched(subject, 4, dtype)
        for order in orders(cache.config["batch_size"]):
            cache.reorder(order)
            given = taken(given, order)
            holds(cache, given, 4, f"of a {dtype} cache after reorder({order})")


@check("EDIT-07a", "contiguous")
def a_batch_without_tokens_is_reordered_too(subject: Subject) -> None:
    subject.need(batch_size=2)
    cache = new(subject, "contiguous", batch_size=3)
    at_least(cache, max_seq_len=2)
    cache.reorder(orders(cache.config["batch_size"])[0])
    given = rows(subject, cache, 2)
    cache.append(*given)
    holds(cache, given, 2, "appended after reorder of a batch without tokens")


@check("EDIT-07ab", "contiguous")
def as_many_rows_as_are_named_are_left(subject: Subject) -> None:
    cache, given = batched(subject, 4)
    at_least(cache, max_seq_len=8)
    batch, tried = cache.config["batch_size"], 0
    for order in ([batch - 1], [0] * 2, [0, *range(batch)], [batch - 1, 0]):
        if not subject.limits.of("contiguous", "batch_size").allows(len(order)):
            continue
        cache, given = batched(subject, 4)
        cache.reorder(order)
        tried += 1
        holds(cache, taken(given, order), 4, f"after reorder({order}) of {batch} rows")
        more = tuple(np.concatenate([part[:1] * np.float32(2) ** n for n in range(len(order))]) for part in given)
        cache.append(*more)
        holds(cache, joined(taken(given, order), (more[0], more[1])), 8, f"appended after reorder({order}) of {batch} rows")
    if not tried:
        raise NotOffered(f"reorder to another batch size than {batch}")


@check("EDIT-07c", "contiguous")
def memory_stays_when_rows_change_places(subject: Subject) -> None:
    subject.in_this_process()
    cache, given = batched(subject, 4)
    before = cache.as_is("raw")
    for buffer in before:
        writable(buffer, "raw buffers that can be written to")
    order = orders(cache.config["batch_size"])[0]
    cache.reorder(order)
    for buffer, want in zip(before, taken(given, order), strict=True):
        seen = numbers(subject.numpy(buffer), cache.config["dtype"])[:, :, :4]
        assert_same(seen, want, f"a raw buffer that was returned before reorder({order})")


@check("EDIT-07d", "contiguous")
def capacity_stays_when_rows_change(subject: Subject) -> None:
    cache, _ = batched(subject, 4)
    capacity, order = cache.capacity, orders(cache.config["batch_size"])[0]
    for rows_left in (order, order[:-1]):
        if subject.limits.of("contiguous", "batch_size").allows(len(rows_left)):
            cache.reorder(rows_left)
            assert_equal(cache.capacity, capacity, f"capacity after reorder({rows_left})")


@check("EDIT-08", "contiguous")
def rows_of_one_origin_go_their_own_ways(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *DTYPES):
        cache, given = batched(subject, 3, dtype)
        at_least(cache, max_seq_len=7)
        order = [1] * cache.config["batch_size"]
        cache.reorder(order)
        held = taken(given, order)
        for count in (1, 2, 1):
            more = rows(subject, cache, count)
            cache.append(*more)
            held = joined(held, more)
            holds(cache, held, held[0].shape[2], f"of a {dtype} cache after reorder({order}) and an append of new tokens")


@check("EDIT-08", "contiguous")
def a_row_written_in_place_leaves_its_twin(subject: Subject) -> None:
    subject.in_this_process()
    cache, given = batched(subject, 3)
    order = [1] * cache.config["batch_size"]
    cache.reorder(order)
    want = [np.array(part) for part in taken(given, order)]
    for part, buffer in zip(want, cache.as_is("raw"), strict=True):
        writable(buffer, "raw buffers that can be written to")
        part[0] *= np.float32(2)
        own: NDArray = as_stored(part[0], subject.numpy(buffer), cache.config["dtype"])
        buffer[0, :, :3, :] = subject.own(own).array
    holds(cache, (want[0], want[1]), 3, "after an in-place write to one of several copies of a row")


@check("EDIT-09", "contiguous")
def a_row_that_is_not_there_is_refused(subject: Subject) -> None:
    cache, *given = filled(subject, 4, batch_size=3)
    batch = cache.config["batch_size"]
    for row in subject.integers(-1, -batch, batch, batch + 1):
        for order in ([row, *range(1, batch)], [*range(1, batch), row], [row] * batch):
            with raises("RowOutOfRange"):
                cache.reorder(order)
            holds(cache, (given[0], given[1]), 4, f"after a rejected reorder({order}) of {batch} rows")


# Checks of LAW-20 for this family.


@check("LAW-20", "contiguous")
def tokens_are_counted_in_any_type(subject: Subject) -> None:
    def advancing(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=300)
        for time in range(4):
            yield f"advance(100), call {time + 1}", typed.call(cache, "advance", 100)
            yield f"seq_len after advance(100), call {time + 1}", cache.seq_len

    the_same_in_any_type(subject, advancing)


@check("LAW-20", "contiguous")
def growth_is_counted_in_any_type(subject: Subject) -> None:
    keys, values = map(ContiguousLawAdapter(subject).laid_out, pair_of_tokens(subject, 110))

    def growing(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=120, initial_capacity=100)
        yield "append of 110 tokens", typed.call(cache, "append", keys, values)
        yield "capacity at 110 tokens", cache.capacity
        yield "110 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, growing)


@check("LAW-20", "contiguous")
def tokens_go_in_any_type(subject: Subject) -> None:
    keys, values = map(ContiguousLawAdapter(subject).laid_out, pair_of_tokens(subject, 110))

    def going_back(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=100)
        at_least(cache, max_seq_len=160)
        cache.append(keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(keys[:, :, :60], values[:, :, :60])
            yield f"seq_len after an append of 60, call {time + 1}", cache.seq_len
        yield "160 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, going_back)


@check("LAW-20", "contiguous")
def rows_are_named_in_any_type(subject: Subject) -> None:
    subject.need(batch_size=2)
    batch = clamp_to_limits(subject, "contiguous", batch_size=3)["batch_size"]
    keys, values = (np.concatenate([batch_major(random_tokens(subject, 2)) for _ in range(batch)]) for _ in ("keys", "values"))

    def turning(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("contiguous", batch_size=3)
        at_least(cache, max_seq_len=2)
        cache.append(keys, values)
        rows = [*range(1, batch), 0]
        yield f"reorder({rows})", typed.call(cache, "reorder", rows)
        yield f"tokens after reorder({rows})", typed.call(cache, "read")

    the_same_in_any_type(subject, turning)


# Checks of LAW-18: a growing buffer that is filled to its last token each time it has grown.


def lanes(streams: Sequence[int], positions: range, written: WrittenContent) -> Iterator[NDArray]:
    """Yields the keys and the values [batch, heads, n, dim] that belong at these positions, with one stream per row."""
    pairs = [pair_of_content(stream, 0, positions, written.heads, written.dim) for stream in streams]
    yield from (np.stack([pair[part].transpose(1, 0, 2) for pair in pairs]) for part in (0, 1))


def append(cache: ObjectProxy, streams: Sequence[int], positions: range, written: WrittenContent) -> None:
    cache.append(*lanes(streams, positions, written))
    for stream in streams:
        written.up_to(stream, 0, positions.stop)


def belong(cache: ObjectProxy, streams: Sequence[NDArray | int], count: int, written: WrittenContent) -> None:
    """Raises Broken unless row i contains the first `count` tokens of stream i (`streams` can name a stream per position)."""
    keys, values = cache.read()
    for b, stream in enumerate(streams):
        belongs((keys[b].transpose(1, 0, 2), values[b].transpose(1, 0, 2)), stream, 0, range(count), written)


@check("LAW-18", "contiguous")
def buffers_are_filled_to_their_last_token(subject: Subject) -> None:
    for initial, heads, dim in ((16, 2, 96), (100, 1, 128), (256, 1, 64), (1, 3, 80)):
        cache = new(
            subject, "contiguous", num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=8 * initial + 600
        )
        config, at = cache.config, 0
        written = WrittenContent(config["num_kv_heads"], config["head_dim"])
        capacity, end = config["initial_capacity"], affordable(subject, config["max_seq_len"], 2)
        while at < end:
            for count in (capacity - at, 1):  # up to the capacity, then one token that makes the buffer grow
                stop = min(at + count, end)
                if stop == at:
                    continue
                append(cache, [0] * config["batch_size"], range(at, stop), written)
                at = stop
                belong(cache, [0], at, written)
            capacity = max(1, 2 * capacity)


@check("LAW-18", "contiguous")
def sequences_of_a_batch_grow_side_by_side(subject: Subject) -> None:
    cache = new(
        subject, "contiguous", batch_size=5, num_kv_heads=4, head_dim=80, initial_capacity=16, max_seq_len=520
    )  # fmt: skip
    config, at = cache.config, 0
    written = WrittenContent(config["num_kv_heads"], config["head_dim"])
    for count in (15, 1, 1, 47, 1, 64, 129, 255, 1):
        stop = min(at + count, config["max_seq_len"])
        if count % 2:
            append(cache, range(config["batch_size"]), range(at, stop), written)
        else:
            cache.append_fused(np.stack(list(lanes(range(config["batch_size"]), range(at, stop), written))))
        at = stop
        for stream in range(config["batch_size"]):
            written.up_to(stream, 0, at)
    belong(cache, range(config["batch_size"]), at, written)


@check("LAW-18", "contiguous")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    cache = new(subject, "contiguous", num_kv_heads=2, head_dim=96, initial_capacity=16, max_seq_len=600)
    config, at = cache.config, 0
    written = WrittenContent(config["num_kv_heads"], config["head_dim"])
    own, another = [0] * config["batch_size"], [1] * config["batch_size"]
    ends = edges(affordable(subject, config["max_seq_len"], 2) - 5)
    for end in ends:
        append(cache, own, range(at, end), written)
        append(cache, another, range(end, end + 5), written)
        cache.truncate(end)
        belong(cache, [0], end, written)
        at = end
    for end in reversed(ends):
        cache.truncate(end)
        belong(cache, [0], end, written)


@check("LAW-18", "contiguous")
def beams_of_many_tokens_go_on_from_each_other(subject: Subject) -> None:
    subject.need(batch_size=2)
    cache = new(subject, "contiguous", batch_size=5, num_kv_heads=4, head_dim=80, initial_capacity=16, max_seq_len=600)
    batch, at = cache.config["batch_size"], 0
    written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
    streams = np.zeros((batch, 0), int)  # the stream of each row and position
    for time, count in enumerate((15, 2, 110, 2, 126, 2, 255, 1)):
        count = min(count, affordable(subject, cache.config["max_seq_len"], 8) - at)
        own = [time * batch + row for row in range(batch)]
        append(cache, own, range(at, at + count), written)
        streams, at = np.concatenate([streams, np.repeat(np.array(own)[:, None], count, axis=1)], axis=1), at + count
        order = [(3 * row + time) // 2 % batch for row in range(batch)]
        cache.reorder(order)
        streams = streams[order]
        belong(cache, list(streams), at, written)
