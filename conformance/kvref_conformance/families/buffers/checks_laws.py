"""Checks of LAW-05, LAW-11, LAW-16, LAW-19 and LAW-20 for this family."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.checking.counts import MANY, NEGATIVE, tried, within_bounds
from kvref_conformance.checking.expect import equal, raises, same
from kvref_conformance.checking.integers import REFUSED, Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.buffers.counts import counters_of


@check("LAW-16", "buffers")
def what_a_buffer_takes_is_left_alone(subject: Subject) -> None:
    subject.in_this_process()
    values = np.array([1.5, -2.5], np.float32)
    own = subject.own(values)
    new(subject, "buffers").acquire(8).extend(own)
    same(subject.numpy(own.array), values, "the input array after extend")


@check("LAW-19", "buffers")
def buffers_are_never_more_than_were_made(subject: Subject) -> None:
    pool = new(subject, "buffers")
    most = pool.config["max_buffers"]
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(pool.prewarm, (1024, 2))]
    wrong += [(pool.prewarm, (1024, count)) for count in NEGATIVE]
    wrong += [(pool.acquire, (count,)) for count in (*NEGATIVE, MANY)]
    buffers = [pool.acquire(10) for _ in range(most + 2)]
    wrong += [(buffer.release, ()) for buffer in buffers for _ in range(2)]
    wrong += [(pool.clear, ()), (buffers[0].release, ()), (pool.clear, ()), (pool.prewarm, (1024, -1))]
    for call, args in wrong:
        tried(call, *args)
        within_bounds(counters_of(pool.stats(), most), f"invalid calls, the last with {args}")


@check("LAW-11", "buffers")
def a_negative_number_of_bytes_or_buffers_is_refused(subject: Subject) -> None:
    pool = new(subject, "buffers")
    for count in NEGATIVE:
        with raises("PositionOutOfRange"):
            pool.acquire(count)
        with raises("PositionOutOfRange"):
            pool.prewarm(1024, count)
    equal(pool.stats().allocations, 0, "allocations after requests for negative numbers")


@check("LAW-20", "buffers")
def bytes_and_buffers_are_counted_in_any_type(subject: Subject) -> None:
    def script(typed: Typed) -> Iterator[Seen]:
        pool = typed.new("buffers")
        yield "prewarm with 3 buffers", typed.call(pool, "prewarm", 1024, 3)
        yield "prewarm with 100 buffers", typed.call(pool, "prewarm", 1024, 100)
        buffer = typed.call(pool, "acquire", 100)
        yield "size of a buffer for 100 bytes", buffer if buffer == REFUSED else buffer.size
        yield "statistics", dict(pool.stats())

    the_same_in_any_type(subject, script)


@check("LAW-05b", "buffers")
def a_buffer_starts_empty_for_its_next_owner(subject: Subject) -> None:
    pool = new(subject, "buffers")
    first = pool.acquire(1000)
    first.extend(np.full(200, 5.0, np.float32))
    first.release()
    second = pool.acquire(1000)
    equal(second.length, 0, "length of a reused buffer")
    second.extend(np.array([1.0, 2.0], np.float32))
    same(second.values(), np.array([1.0, 2.0], np.float32), "values of the buffer's second owner")
    with raises("BufferReleased"):
        first.values()
