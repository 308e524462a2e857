"""Checks of BUF: the buffer pool and its buffers.

In a check with a Session, the model judges all replies of the pool and its buffers, also those of `stats` and `values`.
"""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from kvref.array import Array
from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.buffers import counters_of
from kvref_conformance.families.buffers.model import SIZE_CLASSES
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_true, normal_rows, raises
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.testlib.integer_types import Observation, RaisedError, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    assert_counters_within_bounds,
    call_tolerating_errors,
)
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.thread_stress import NUM_THREADS, require_threads, run_in_threads


def assert_counts(pool: ObjectProxy, counts: tuple[int, ...], free: dict[int, int] | None = None) -> None:
    """counts: the expected hits, misses, allocations, returns and drops. free: the free buffers by class, if they are judged."""
    stats = pool.stats()
    numbers = stats.hits, stats.misses, stats.allocations, stats.returns, stats.drops
    assert_equal(numbers, counts, "hits, misses, allocations, returns, drops")
    if free is not None:
        assert_equal({size: count for size, count in dict(stats.free).items() if count}, free, "free buffers by class")


@check("BUF-01", "buffers")
def acquire_returns_the_smallest_class_that_fits(subject: Subject) -> None:
    pool = new_object(subject, "buffers")
    for size in (1024, 4096, 16384, 65536, 262144):
        for request in (size, size - 1, size // 4 + 1):
            buffer = pool.acquire(request)
            assert_equal((buffer.size, buffer.capacity), (size, size // 4), f"size and capacity of a buffer for {request} bytes")
            buffer.release()
    assert_equal(pool.acquire(0).size, 1024, "size of a buffer for 0 bytes")
    for request in (256 * 1024 + 1, 2**40):
        with raises("BufferTooLarge"):
            pool.acquire(request)
    for request in subject.integers(-1):
        with raises("PositionOutOfRange"):
            pool.acquire(request)


@check("BUF-02a", "buffers")
def acquire_returns_memory_that_no_buffer_in_use_has(subject: Subject) -> None:
    pool, live = new_object(subject, "buffers"), dict[int, Any]()
    for mark in range(1, 25):
        buffer = pool.acquire(int(subject.rng.choice([100, 1024, 3000, 5000])))
        buffer.extend(np.full(buffer.capacity, mark, np.float32))
        live[mark] = buffer
        if mark % 3 == 0:
            live.pop(int(subject.rng.choice(list(live)))).release()
        for other, buffer in live.items():
            want = np.full(buffer.capacity, other, np.float32)
            assert_same(buffer.values(), want, f"values of buffer {other}, one of {len(live)} in use")


@check("BUF-02ab", "buffers")
def address_is_a_multiple_of_a_cache_line(subject: Subject) -> None:
    pool, spans = new_object(subject, "buffers"), list[tuple[int, int]]()
    buffers = [pool.acquire(request) for request in (1, 1024, 1025, 20000, 70000, 5, 5)]
    for buffer in buffers:
        address = buffer.address
        if address is None:
            raise NotOffered("addresses of buffers")
        assert_equal(address % 64, 0, "address of a buffer, modulo 64")
        apart = all(address >= end or address + buffer.size <= begin for begin, end in spans)
        assert_true(apart, "address of a buffer, compared with other buffers in use", "no overlap", address)
        spans.append((address, address + buffer.size))


@check("BUF-03", "buffers")
def stats_add_up(subject: Subject) -> None:
    pool, live = Session(subject).cache, list[Any]()
    for _ in range(150):
        choice = subject.rng.random()
        if choice < 0.5:
            live.append(pool.acquire(int(subject.rng.integers(0, 9000))))
        elif live and choice < 0.9:
            live.pop(subject.rng.integers(len(live))).release()
        else:
            pool.prewarm(4096, 2)
        pool.stats()


@check("BUF-03", "buffers")
def acquire_of_a_released_class_is_a_hit(subject: Subject) -> None:
    pool = new_object(subject, "buffers")
    pool.acquire(10).release()
    assert_counts(pool, (0, 1, 1, 1, 0))
    pool.acquire(1024)
    assert_counts(pool, (1, 1, 1, 1, 0))
    pool.acquire(1025)
    assert_counts(pool, (1, 2, 2, 1, 0))


@check("BUF-04", "buffers")
def release_keeps_at_most_max_buffers(subject: Subject) -> None:
    pool = new_object(subject, "buffers", max_buffers=3)
    most = pool.config["max_buffers"]
    for buffer in [pool.acquire(2000) for _ in range(most + 2)] + [pool.acquire(10) for _ in range(most)]:
        buffer.release()
    count = 2 * most + 2
    assert_counts(pool, (0, count, count, count, 2), free={1024: most, 4096: most})


@check("BUF-05", "buffers")
def release_twice_counts_once(subject: Subject) -> None:
    pool = Session(subject).cache
    buffer = pool.acquire(10)
    buffer.release()
    buffer.release()
    assert_counts(pool, (0, 1, 1, 1, 0), free={1024: 1})
    first, second = pool.acquire(10), pool.acquire(10)
    buffer.release()  # its memory belongs to the next owner by now
    first.extend(np.ones(4, np.float32))
    second.extend(np.zeros(4, np.float32))
    first.values()
    pool.stats()


@check("BUF-06", "buffers")
def prewarm_fills_the_free_list(subject: Subject) -> None:
    pool = Session(subject).cache
    most = pool.config["max_buffers"]
    less = max(1, most - 1)
    pool.prewarm(1024, less)
    pool.prewarm(65536, most + 5)
    assert_counts(pool, (0, 0, less + most, 0, 0), free={1024: less, 65536: most})
    pool.acquire(1000)
    pool.stats()
    for count in (less, most):
        pool.prewarm(4096, count)
        pool.stats()
    with raises("ConfigError"):
        pool.prewarm(2048, 1)
    pool.clear()
    assert_equal(sum(dict(pool.stats().free).values()), 0, "free buffers after clear")


@check("BUF-07", "buffers")
def hit_rate_is_hits_over_requests(subject: Subject) -> None:
    pool = new_object(subject, "buffers")
    assert_equal(pool.stats().hit_rate, 0.0, "hit rate before the first request")
    pool.prewarm(1024, 1)
    assert_equal(pool.stats().hit_rate, 0.0, "hit rate after prewarm, before the first request")
    for requests in (1, 2, 3):
        pool.acquire(1)
        rate = pool.stats().hit_rate
        assert_true(abs(rate - 1 / requests) < 1e-6, "hit rate", f"1 / {requests}", rate)


@check("BUF-09a", "buffers")
def extend_past_the_capacity_raises(subject: Subject) -> None:
    buffer = Session(subject).cache.acquire(1000)
    values = normal_rows(subject, 256)
    buffer.extend(values[:100])
    buffer.extend(values[100:255])
    buffer.values()
    with raises("CapacityExceeded"):
        buffer.extend(values[:2])
    assert_equal(buffer.length, 255, "length after CapacityExceeded")
    buffer.extend(values[255:])
    assert_same(buffer.values(), values, "values of a full buffer")


@check("BUF-09b", "buffers")
def clear_empties_a_buffer_in_use(subject: Subject) -> None:
    pool = Session(subject).cache
    buffer = pool.acquire(1000)
    buffer.extend(np.ones(9, np.float32))
    buffer.clear()
    assert_equal((buffer.length, len(buffer.values())), (0, 0), "length and number of values after clear")
    pool.stats()
    buffer.extend(np.full(2, 3.0, np.float32))
    buffer.values()


@check("BUF-09c", "buffers")
def release_makes_further_calls_raise(subject: Subject) -> None:
    buffer = new_object(subject, "buffers").acquire(1000)
    buffer.release()
    for method, arguments in (("extend", (np.ones(1, np.float32),)), ("values", ()), ("clear", ())):
        with raises("BufferReleased"):
            getattr(buffer, method)(*arguments)


# Checks of LAW-05, LAW-11, LAW-16, LAW-19 and LAW-20 for this family.


@check("LAW-16", "buffers")
def extend_does_not_modify_its_input(subject: Subject) -> None:
    subject.require_same_process()
    values = np.array([1.5, -2.5], np.float32)
    own = subject.to_own_array(values)
    new_object(subject, "buffers").acquire(8).extend(own)
    assert_same(subject.numpy(own.array), values, "the input array after extend")


@check("LAW-19", "buffers")
def stats_stay_within_bounds_after_invalid_calls(subject: Subject) -> None:
    pool = new_object(subject, "buffers")
    most = pool.config["max_buffers"]
    buffers = [pool.acquire(10) for _ in range(most + 2)]
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(pool.prewarm, (1024, count)) for count in (2, *NEGATIVE)]
    wrong += [(pool.acquire, (count,)) for count in (*NEGATIVE, LARGEST_JSON_INTEGER)]
    wrong += [(buffer.release, ()) for buffer in buffers for _ in range(2)]
    wrong += [(pool.clear, ()), (buffers[0].release, ()), (pool.clear, ()), (pool.prewarm, (1024, -1))]
    for call, args in wrong:
        call_tolerating_errors(call, *args)
        assert_counters_within_bounds(counters_of(pool.stats(), most), f"invalid calls, the last with {args}")


@check("LAW-11", "buffers")
def acquire_and_prewarm_of_negative_numbers_raise(subject: Subject) -> None:
    pool = new_object(subject, "buffers")
    for count in NEGATIVE:
        with raises("PositionOutOfRange"):
            pool.acquire(count)
        with raises("PositionOutOfRange"):
            pool.prewarm(1024, count)
    assert_equal(pool.stats().allocations, 0, "allocations after requests for negative numbers")


@check("LAW-20", "buffers")
def acquire_and_prewarm_accept_every_integer_type(subject: Subject) -> None:
    def script(typed: TypedIntegers) -> Iterator[Observation]:
        pool = typed.new("buffers")
        yield "prewarm with 3 buffers", typed.call(pool, "prewarm", 1024, 3)
        yield "prewarm with 100 buffers", typed.call(pool, "prewarm", 1024, 100)
        buffer = typed.call(pool, "acquire", 100)
        yield "size of a buffer for 100 bytes", buffer if isinstance(buffer, RaisedError) else buffer.size
        yield "statistics", dict(pool.stats())

    assert_same_for_integer_types(subject, script)


@check("LAW-05b", "buffers")
def acquire_returns_an_empty_buffer(subject: Subject) -> None:
    pool = Session(subject).cache
    first = pool.acquire(1000)
    first.extend(np.full(200, 5.0, np.float32))
    first.release()
    second = pool.acquire(1000)
    assert_equal(second.length, 0, "length of a reused buffer")
    second.extend(np.array([1.0, 2.0], np.float32))
    second.values()
    with raises("BufferReleased"):
        first.values()


# Checks of LAW-18: hundreds of buffers, filled to their last value.


@check("LAW-18", "buffers")
def extend_fills_every_class_to_its_last_value(subject: Subject) -> None:
    pool = Session(subject).cache
    buffers = [pool.acquire(size) for size in (*SIZE_CLASSES, SIZE_CLASSES[-1] - 3)]
    for buffer in buffers:
        for count in (buffer.capacity - 1, 1):
            buffer.extend(normal_rows(subject, count))
    for buffer in buffers:
        buffer.values()


@check("LAW-18", "buffers")
def acquire_keeps_hundreds_of_buffers_apart(subject: Subject) -> None:
    pool = Session(subject, max_buffers=300).cache
    buffers = [pool.acquire(1024 if number % 3 else 4096) for number in range(400)]
    for buffer in buffers:
        buffer.extend(normal_rows(subject, 70))
    for buffer in buffers[::2]:
        buffer.release()
    for number in range(300):
        buffers.append(pool.acquire(1000))
        buffers[-1].extend(normal_rows(subject, 33 + number % 90))
    for buffer in buffers[1:400:2] + buffers[400:]:
        buffer.values()
    assert_equal(pool.stats().returns, 200, "returns in the statistics")


# Checks of BUF-08: a buffer pool and its buffers used by several threads.


@check("BUF-08a", "buffers")
def acquire_and_release_by_several_threads_lose_no_buffer(subject: Subject) -> None:
    each = 150
    pool = new_object(subject, "buffers", max_buffers=64)

    def work(thread: int, rng: np.random.Generator) -> None:
        mark = np.full(8, thread + 1, np.float32)
        for _ in range(each):
            one, two = pool.acquire(10), pool.acquire(10)
            one.extend(mark)
            two.extend(-mark)
            assert_same(one.values(), mark, "values of a thread's own buffer")
            one.release()
            two.release()

    run_in_threads(subject, work)
    stats = pool.stats()
    requests = 2 * NUM_THREADS * each
    assert_equal((stats.hits + stats.misses, stats.returns), (requests, requests), "number of requests and of returns")
    assert_free_after_all_releases(stats)


@check("BUF-08a", "buffers")
def stats_add_up_after_calls_of_several_threads(subject: Subject) -> None:
    pool, requests = new_object(subject, "buffers", max_buffers=8), list[int]()

    def work(thread: int, rng: np.random.Generator) -> None:
        buffers_in_use = list[tuple[ObjectProxy, NDArray]]()
        for i in range(60):  # so that bfloat16 can represent every mark
            choice = rng.integers(4)
            if choice == 0 and buffers_in_use:
                buffer, values = buffers_in_use.pop(int(rng.integers(len(buffers_in_use))))
                assert_same(buffer.values(), values, "values of a thread's own buffer")
                buffer.release()
            elif choice == 1:
                pool.prewarm(1024, int(rng.integers(3)))
            else:
                values = np.full(int(rng.integers(1, 200)), 60 * thread + i, np.float32)
                buffer = pool.acquire(int(rng.choice([1, 1000, 3000])))
                requests.append(1)
                buffer.extend(values)
                buffers_in_use.append((buffer, values))
        for buffer, _ in buffers_in_use:
            buffer.release()

    run_in_threads(subject, work)
    stats = pool.stats()
    assert_equal((stats.hits + stats.misses, stats.returns), (len(requests), len(requests)), "number of requests and of returns")
    assert_free_after_all_releases(stats)


def assert_free_after_all_releases(stats: Any) -> None:
    count = stats.allocations - stats.drops
    assert_equal(sum(dict(stats.free).values()), count, "free buffers, compared with allocations - drops")


@check("BUF-08a", "buffers")
def extend_by_several_threads_keeps_all_values(subject: Subject) -> None:
    buffer, each = new_object(subject, "buffers").acquire(SIZE_CLASSES[1]), 20
    marks = [np.full(8, thread + 1, np.float32) for thread in range(NUM_THREADS)]

    def work(thread: int, rng: np.random.Generator) -> None:
        for _ in range(each):
            buffer.extend(marks[thread])

    run_in_threads(subject, work)
    rows = buffer.values().reshape(-1, 8)
    want = np.concatenate([np.tile(mark, (each, 1)) for mark in marks])
    assert_same(rows[np.argsort(rows[:, 0], kind="stable")], want, "values of a buffer that four threads filled, sorted")


@check("BUF-08b", "buffers")
def release_waits_until_the_buffer_is_written(subject: Subject) -> None:
    """One thread fills a buffer while another releases it, acquires its memory and writes other values.

    The calls are made on the implementation's objects and not recorded, because recording takes longer than the race window.
    """
    require_threads(subject)
    handle, size = new_object(subject, "buffers", max_buffers=64), SIZE_CLASSES[-1]
    first = handle.acquire(size)
    first.extend(np.ones(1, np.float32))
    first.release()  # one of these raises NotOffered if it is missing
    pool, (old, own) = (
        subject.objects[handle.id],
        (subject.to_own_array(np.full(size // 4, mark, np.float32)).array for mark in (1, 2)),
    )
    took = min(_seconds(pool.acquire(size).extend, old) for _ in range(3))
    for _ in range(100):
        owner = _next_owner(subject, pool, old, own, after=float(subject.rng.uniform(0, 2 * took)))
        assert_same(subject.numpy(owner.values()), np.full(size // 4, 2, np.float32), "values of the buffer's next owner")
        owner.release()


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    began = perf_counter()
    call(*arguments)
    return perf_counter() - began


def _next_owner(subject: Subject, pool: Any, old: Array, own: Array, after: float) -> Any:
    """Returns a buffer with the values `own`, acquired while another thread fills the released buffer with `old`."""
    buffer, taken = pool.acquire(SIZE_CLASSES[-1]), list[Any]()

    def work(thread: int, rng: np.random.Generator) -> None:
        if thread == 0:
            try:
                buffer.extend(old)
            except Exception as error:
                if "BufferReleased" not in error_kinds(error):
                    raise
        elif thread == 1:
            began = perf_counter()
            while perf_counter() < began + after:
                pass
            buffer.release()
            taken.append(pool.acquire(SIZE_CLASSES[-1]))
            taken[0].extend(own)

    run_in_threads(subject, work)
    return taken[0]
