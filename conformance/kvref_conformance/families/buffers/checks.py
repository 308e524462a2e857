"""Checks of BUF: the buffer pool and its buffers."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from kvref.array import Array
from kvref_conformance.calls.messages import kinds_of
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.buffers.counter_bounds import counters_of
from kvref_conformance.families.buffers.model import SIZE_CLASSES
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_same, raises, true
from kvref_conformance.testlib.fixtures import new
from kvref_conformance.testlib.integer_types import REFUSED, Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, tried, within_bounds
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import KEYS, content
from kvref_conformance.testlib.thread_stress import THREADS, in_threads

CLASSES = tuple(kib * 1024 for kib in (1, 4, 16, 64, 256))


def counts(pool: ObjectProxy) -> tuple[int, ...]:
    stats = pool.stats()
    return stats.hits, stats.misses, stats.allocations, stats.returns, stats.drops


def free(pool: ObjectProxy) -> dict[int, int]:
    return {size: count for size, count in dict(pool.stats().free).items() if count}


@check("BUF-01", "buffers")
def a_request_gets_the_smallest_class_that_fits(subject: Subject) -> None:
    pool = new(subject, "buffers")
    for size in CLASSES:
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
def live_buffers_never_overlap(subject: Subject) -> None:
    pool, live = new(subject, "buffers"), dict[int, Any]()
    for mark in range(1, 25):
        buffer = pool.acquire(int(subject.rng.choice([100, 1024, 3000, 5000])))
        buffer.extend(np.full(buffer.capacity, mark, np.float32))
        live[mark] = buffer
        if mark % 3 == 0:
            live.pop(int(subject.rng.choice(list(live)))).release()
        for other, held in live.items():
            assert_same(
                held.values(), np.full(held.capacity, other, np.float32), f"values of buffer {other}, one of {len(live)} in use"
            )


@check("BUF-02ab", "buffers")
def buffers_start_at_a_cache_line(subject: Subject) -> None:
    pool, seen = new(subject, "buffers"), list[tuple[int, int]]()
    held = [pool.acquire(request) for request in (1, 1024, 1025, 20000, 70000, 5, 5)]
    for buffer in held:
        address = buffer.address
        if address is None:
            raise NotOffered("addresses of buffers")
        assert_equal(address % 64, 0, "address of a buffer, modulo 64")
        true(
            all(address >= end or address + buffer.size <= begin for begin, end in seen),
            "address of a buffer, compared with other buffers in use",
            "no overlap",
            address,
        )
        seen.append((address, address + buffer.size))


@check("BUF-03", "buffers")
def the_statistics_add_up(subject: Subject) -> None:
    pool, live, prewarmed, acquired, returned = new(subject, "buffers"), list[Any](), 0, 0, 0
    for _ in range(150):
        choice = subject.rng.random()
        if choice < 0.5:
            live.append(pool.acquire(int(subject.rng.integers(0, 9000))))
            acquired += 1
        elif live and choice < 0.9:
            live.pop(subject.rng.integers(len(live))).release()
            returned += 1
        else:
            before = sum(free(pool).values())
            pool.prewarm(4096, 2)
            prewarmed += sum(free(pool).values()) - before
        stats = pool.stats()
        assert_equal(stats.hits + stats.misses, acquired, "hits + misses, compared with the number of requests")
        assert_equal(stats.allocations, stats.misses + prewarmed, "allocations, compared with misses + prewarmed buffers")
        assert_equal(stats.returns, returned, "returns, compared with the number of releases")
        want = prewarmed + stats.returns - stats.drops - stats.hits
        assert_equal(sum(free(pool).values()), want, "free buffers, compared with prewarmed + returns - drops - hits")


@check("BUF-03", "buffers")
def a_second_request_is_a_hit(subject: Subject) -> None:
    pool = new(subject, "buffers")
    pool.acquire(10).release()
    assert_equal(counts(pool), (0, 1, 1, 1, 0), "hits, misses, allocations, returns, drops after one request")
    pool.acquire(1024)
    assert_equal(counts(pool), (1, 1, 1, 1, 0), "hits, misses, allocations, returns, drops after a second request of its class")
    pool.acquire(1025)
    assert_equal(counts(pool), (1, 2, 2, 1, 0), "hits, misses, allocations, returns, drops after a request of another class")


@check("BUF-04", "buffers")
def at_most_max_buffers_are_kept(subject: Subject) -> None:
    pool = new(subject, "buffers", max_buffers=3)
    most = pool.config["max_buffers"]
    held = [pool.acquire(2000) for _ in range(most + 2)] + [pool.acquire(10) for _ in range(most)]
    for buffer in held:
        buffer.release()
    assert_equal(free(pool), {1024: most, 4096: most}, "free buffers by class")
    all_of_them = 2 * most + 2
    assert_equal(counts(pool), (0, all_of_them, all_of_them, all_of_them, 2), "hits, misses, allocations, returns, drops")


@check("BUF-05", "buffers")
def releasing_twice_counts_once(subject: Subject) -> None:
    pool = new(subject, "buffers")
    buffer = pool.acquire(10)
    buffer.release()
    buffer.release()
    assert_equal(counts(pool), (0, 1, 1, 1, 0), "hits, misses, allocations, returns, drops after releasing twice")
    assert_equal(free(pool), {1024: 1}, "free buffers after releasing twice")
    first, second = pool.acquire(10), pool.acquire(10)
    buffer.release()  # its memory belongs to the next owner by now
    first.extend(np.ones(4, np.float32))
    second.extend(np.zeros(4, np.float32))
    assert_same(first.values(), np.ones(4, np.float32), "values of a buffer after its former owner released it a second time")
    assert_equal(free(pool), {}, "free buffers after a former owner released a reused buffer a second time")


@check("BUF-06", "buffers")
def prewarming_fills_the_free_list(subject: Subject) -> None:
    pool = new(subject, "buffers")
    most = pool.config["max_buffers"]
    some = max(1, most - 1)
    pool.prewarm(1024, some)
    pool.prewarm(65536, most + 5)
    assert_equal(free(pool), {1024: some, 65536: most}, f"free buffers after prewarm, with max_buffers {most}")
    assert_equal(counts(pool), (0, 0, some + most, 0, 0), "hits, misses, allocations, returns, drops")
    pool.acquire(1000)
    assert_equal(counts(pool), (1, 0, some + most, 0, 0), "hits, misses, allocations, returns, drops after a request")
    pool.prewarm(4096, some)
    pool.prewarm(4096, most)
    assert_equal(free(pool)[4096], most, f"free buffers after prewarm with {some} and with {most}")
    with raises("ConfigError"):
        pool.prewarm(2048, 1)
    pool.clear()
    assert_equal(free(pool), {}, "free buffers after clear")


@check("BUF-07", "buffers")
def the_hit_rate_is_hits_over_requests(subject: Subject) -> None:
    pool = new(subject, "buffers")
    assert_equal(pool.stats().hit_rate, 0.0, "hit rate before the first request")
    pool.prewarm(1024, 1)
    assert_equal(pool.stats().hit_rate, 0.0, "hit rate after prewarm, before the first request")
    for hits, requests in ((1, 1), (1, 2), (1, 3)):
        pool.acquire(1)
        true(abs(pool.stats().hit_rate - hits / requests) < 1e-6, "hit rate", f"{hits} / {requests}", pool.stats().hit_rate)


@check("BUF-09a", "buffers")
def a_buffer_is_never_extended_past_capacity(subject: Subject) -> None:
    buffer = new(subject, "buffers").acquire(1000)
    values = round_to(subject.rng.normal(size=256).astype(np.float32), subject.dtype)
    buffer.extend(values[:100])
    buffer.extend(values[100:255])
    assert_same(buffer.values(), values[:255], "values after two calls of extend")
    with raises("CapacityExceeded"):
        buffer.extend(values[:2])
    assert_equal(buffer.length, 255, "length after CapacityExceeded")
    buffer.extend(values[255:])
    assert_same(buffer.values(), values, "values of a full buffer")


@check("BUF-09b", "buffers")
def a_cleared_buffer_is_empty_and_in_use(subject: Subject) -> None:
    pool = new(subject, "buffers")
    buffer = pool.acquire(1000)
    buffer.extend(np.ones(9, np.float32))
    buffer.clear()
    assert_equal((buffer.length, len(buffer.values())), (0, 0), "length and values after clear")
    assert_equal(pool.stats().returns, 0, "returns in the pool's statistics after clear of a buffer")
    buffer.extend(np.full(2, 3.0, np.float32))
    assert_same(buffer.values(), np.full(2, 3.0, np.float32), "values written after clear")


@check("BUF-09c", "buffers")
def a_released_buffer_refuses_everything(subject: Subject) -> None:
    buffer = new(subject, "buffers").acquire(1000)
    buffer.release()
    for method, arguments in (("extend", (np.ones(1, np.float32),)), ("values", ()), ("clear", ())):
        with raises("BufferReleased"):
            getattr(buffer, method)(*arguments)


# Checks of LAW-05, LAW-11, LAW-16, LAW-19 and LAW-20 for this family.


@check("LAW-16", "buffers")
def what_a_buffer_takes_is_left_alone(subject: Subject) -> None:
    subject.in_this_process()
    values = np.array([1.5, -2.5], np.float32)
    own = subject.own(values)
    new(subject, "buffers").acquire(8).extend(own)
    assert_same(subject.numpy(own.array), values, "the input array after extend")


@check("LAW-19", "buffers")
def buffers_are_never_more_than_were_made(subject: Subject) -> None:
    pool = new(subject, "buffers")
    most = pool.config["max_buffers"]
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(pool.prewarm, (1024, 2))]
    wrong += [(pool.prewarm, (1024, count)) for count in NEGATIVE]
    wrong += [(pool.acquire, (count,)) for count in (*NEGATIVE, LARGEST_JSON_INTEGER)]
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
    assert_equal(pool.stats().allocations, 0, "allocations after requests for negative numbers")


@check("LAW-20", "buffers")
def bytes_and_buffers_are_counted_in_any_type(subject: Subject) -> None:
    def script(typed: TypedIntegers) -> Iterator[Seen]:
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
    assert_equal(second.length, 0, "length of a reused buffer")
    second.extend(np.array([1.0, 2.0], np.float32))
    assert_same(second.values(), np.array([1.0, 2.0], np.float32), "values of the buffer's second owner")
    with raises("BufferReleased"):
        first.values()


# Checks of LAW-18: hundreds of buffers, filled to their last value.


def values(number: int, start: int, stop: int) -> NDArray:
    """Returns float32 [stop - start]: the values that belong in buffer `number` at [start, stop)."""
    return content(number, 0, range(start, stop), 1, 1, KEYS).reshape(-1)


@check("LAW-18", "buffers")
def buffers_of_every_class_are_filled_to_their_last_value(subject: Subject) -> None:
    pool = new(subject, "buffers")
    held = [pool.acquire(size) for size in (*SIZE_CLASSES, SIZE_CLASSES[-1] - 3)]
    for number, buffer in enumerate(held):
        room = buffer.capacity
        for start, stop in ((0, room - 1), (room - 1, room)):
            buffer.extend(values(number, start, stop))
    for number, buffer in enumerate(held):
        assert_same(buffer.values(), values(number, 0, buffer.capacity), f"values of a buffer of {buffer.size} bytes")


@check("LAW-18", "buffers")
def hundreds_of_buffers_are_held_at_once(subject: Subject) -> None:
    pool = new(subject, "buffers", max_buffers=300)
    held = {number: pool.acquire(1024 if number % 3 else 4096) for number in range(400)}
    for number, buffer in held.items():
        buffer.extend(values(number, 0, 70))
    for number in range(0, 400, 2):
        held.pop(number).release()
    kept = min(200, pool.config["max_buffers"])
    for number in range(400, 700):
        held[number] = pool.acquire(1000)
        held[number].extend(values(number, 0, 33 + number % 90))
    for number, buffer in held.items():
        assert_same(buffer.values(), values(number, 0, 70 if number < 400 else 33 + number % 90), f"values of buffer {number}")
    stats = pool.stats()
    assert_equal(stats.returns, 200, "returns in the statistics")
    assert_equal(stats.hits <= kept, True, f"whether there are at most {kept} hits, one per kept buffer")


# Checks of BUF-08: a buffer pool and its buffers used by several threads.


@check("BUF-08a", "buffers")
def threads_may_share_a_pool(subject: Subject) -> None:
    each = 150
    pool = new(subject, "buffers", max_buffers=64)

    def work(thread: int, rng: np.random.Generator) -> None:
        mark = np.full(8, thread + 1, np.float32)
        for _ in range(each):
            one, two = pool.acquire(10), pool.acquire(10)
            one.extend(mark)
            two.extend(-mark)
            assert_same(one.values(), mark, "values of a thread's own buffer")
            one.release()
            two.release()

    in_threads(subject, work)
    stats = pool.stats()
    requests = 2 * THREADS * each
    assert_equal((stats.hits + stats.misses, stats.returns), (requests, requests), "number of requests and of returns")
    assert_equal(free(pool), {1024: stats.allocations - stats.drops}, "free buffers, compared with allocations - drops")


@check("BUF-08a", "buffers")
def threads_may_mix_their_calls(subject: Subject) -> None:
    pool, requests = new(subject, "buffers", max_buffers=8), list[int]()

    def work(thread: int, rng: np.random.Generator) -> None:
        held = list[tuple[ObjectProxy, NDArray]]()
        for i in range(60):  # so that bfloat16 can represent every mark
            choice = rng.integers(4)
            if choice == 0 and held:
                buffer, values = held.pop(int(rng.integers(len(held))))
                assert_same(buffer.values(), values, "values of a thread's own buffer")
                buffer.release()
            elif choice == 1:
                pool.prewarm(1024, int(rng.integers(3)))
            else:
                values = np.full(int(rng.integers(1, 200)), 60 * thread + i, np.float32)
                buffer = pool.acquire(int(rng.choice([1, 1000, 3000])))
                requests.append(1)
                buffer.extend(values)
                held.append((buffer, values))
        for buffer, _ in held:
            buffer.release()

    in_threads(subject, work)
    stats = pool.stats()
    assert_equal((stats.hits + stats.misses, stats.returns), (len(requests), len(requests)), "number of requests and of returns")
    assert_equal(
        sum(dict(stats.free).values()), stats.allocations - stats.drops, "free buffers, compared with allocations - drops"
    )


@check("BUF-08a", "buffers")
def threads_may_fill_one_buffer(subject: Subject) -> None:
    buffer, each = new(subject, "buffers").acquire(CLASSES[1]), 20
    marks = [np.full(8, thread + 1, np.float32) for thread in range(THREADS)]

    def work(thread: int, rng: np.random.Generator) -> None:
        for _ in range(each):
            buffer.extend(marks[thread])

    in_threads(subject, work)
    rows = buffer.values().reshape(-1, 8)
    want = np.concatenate([np.tile(mark, (each, 1)) for mark in marks])
    assert_same(rows[np.argsort(rows[:, 0], kind="stable")], want, "values of a buffer that four threads filled, sorted")


@check("BUF-08b", "buffers")
def a_release_waits_for_what_is_being_written(subject: Subject) -> None:
    """One thread fills a buffer while another releases it, acquires its memory and writes other values.

    The calls are made on the implementation's objects and not recorded, because recording takes longer than the race window.
    """
    subject.in_this_process("calls from several threads")
    handle, size = new(subject, "buffers", max_buffers=64), CLASSES[-1]
    first = handle.acquire(size)
    first.extend(np.ones(1, np.float32))
    first.release()  # one of these raises NotOffered if it is missing
    pool, (old, own) = subject.held[handle.id], (subject.own(np.full(size // 4, mark, np.float32)).array for mark in (1, 2))
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
    buffer, taken = pool.acquire(CLASSES[-1]), list[Any]()

    def work(thread: int, rng: np.random.Generator) -> None:
        if thread == 0:
            try:
                buffer.extend(old)
            except Exception as error:
                if "BufferReleased" not in kinds_of(error):
                    raise
        elif thread == 1:
            began = perf_counter()
            while perf_counter() < began + after:
                pass
            buffer.release()
            taken.append(pool.acquire(CLASSES[-1]))
            taken[0].extend(own)

    in_threads(subject, work)
    return taken[0]
