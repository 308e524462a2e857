"""Checks of EDIT for the contiguous cache: `truncate` and `reorder`."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, new
from kvref_conformance.conversation.calls import writable
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.contiguous.checks import DTYPES, Pair, filled, joined, rows
from kvref_conformance.families.contiguous.memory import as_stored, numbers
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.outcome import NotOffered


def leading(given: Pair, length: int, dtype: str) -> Pair:
    """Returns what the first `length` of these tokens read as."""
    keys, values = (round_to(part[:, :, :length], dtype) for part in given)
    return keys, values


def holds(cache: Handle, given: Pair, length: int, when: str) -> None:
    """Raises Broken unless the cache contains exactly the first `length` of these tokens."""
    equal(cache.seq_len, length, f"length {when}")
    pair(cache.read(), leading(given, length, cache.config["dtype"]), f"tokens {when}")


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
    equal(cache.capacity, capacity, "capacity after truncate(2)")
    same(numbers(cache.raw()[0][:, :, :2], cache.config["dtype"]), keys[:, :, :2], "the first 2 tokens of the raw buffer")
    cache.truncate(0)
    equal(cache.capacity, capacity, "capacity after truncate(0)")


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
    same(seen[:, :, 2:3], more[0], "the key at position 2 of the buffer that raw returned before truncate and append")


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
    equal(empty.seq_len, 0, "length of a new cache after truncate(0)")


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


def batched(subject: Subject, count: int, dtype: str | None = None) -> tuple[Handle, Pair]:
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
        same(seen, want, f"a raw buffer that was returned before reorder({order})")


@check("EDIT-07d", "contiguous")
def capacity_stays_when_rows_change(subject: Subject) -> None:
    cache, _ = batched(subject, 4)
    capacity, order = cache.capacity, orders(cache.config["batch_size"])[0]
    for rows_left in (order, order[:-1]):
        if subject.limits.of("contiguous", "batch_size").allows(len(rows_left)):
            cache.reorder(rows_left)
            equal(cache.capacity, capacity, f"capacity after reorder({rows_left})")


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
