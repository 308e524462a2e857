"""Checks of BUF: the buffer pool and its buffers."""

from typing import Any

import numpy as np

from kvref_conformance.checking.expect import equal, raises, same, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.outcome import NotOffered

CLASSES = tuple(kib * 1024 for kib in (1, 4, 16, 64, 256))


def counts(pool: Handle) -> tuple[int, ...]:
    stats = pool.stats()
    return stats.hits, stats.misses, stats.allocations, stats.returns, stats.drops


def free(pool: Handle) -> dict[int, int]:
    return {size: count for size, count in dict(pool.stats().free).items() if count}


@check("BUF-01", "buffers")
def a_request_gets_the_smallest_class_that_fits(subject: Subject) -> None:
    pool = new(subject, "buffers")
    for size in CLASSES:
        for request in (size, size - 1, size // 4 + 1):
            buffer = pool.acquire(request)
            equal((buffer.size, buffer.capacity), (size, size // 4), f"size and capacity of a buffer for {request} bytes")
            buffer.release()
    equal(pool.acquire(0).size, 1024, "size of a buffer for 0 bytes")
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
            same(held.values(), np.full(held.capacity, other, np.float32), f"values of buffer {other}, one of {len(live)} in use")


@check("BUF-02ab", "buffers")
def buffers_start_at_a_cache_line(subject: Subject) -> None:
    pool, seen = new(subject, "buffers"), list[tuple[int, int]]()
    held = [pool.acquire(request) for request in (1, 1024, 1025, 20000, 70000, 5, 5)]
    for buffer in held:
        address = buffer.address
        if address is None:
            raise NotOffered("addresses of buffers")
        equal(address % 64, 0, "address of a buffer, modulo 64")
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
        equal(stats.hits + stats.misses, acquired, "hits + misses, compared with the number of requests")
        equal(stats.allocations, stats.misses + prewarmed, "allocations, compared with misses + prewarmed buffers")
        equal(stats.returns, returned, "returns, compared with the number of releases")
        want = prewarmed + stats.returns - stats.drops - stats.hits
        equal(sum(free(pool).values()), want, "free buffers, compared with prewarmed + returns - drops - hits")


@check("BUF-03", "buffers")
def a_second_request_is_a_hit(subject: Subject) -> None:
    pool = new(subject, "buffers")
    pool.acquire(10).release()
    equal(counts(pool), (0, 1, 1, 1, 0), "hits, misses, allocations, returns, drops after one request")
    pool.acquire(1024)
    equal(counts(pool), (1, 1, 1, 1, 0), "hits, misses, allocations, returns, drops after a second request of its class")
    pool.acquire(1025)
    equal(counts(pool), (1, 2, 2, 1, 0), "hits, misses, allocations, returns, drops after a request of another class")


@check("BUF-04", "buffers")
def at_most_max_buffers_are_kept(subject: Subject) -> None:
    pool = new(subject, "buffers", max_buffers=3)
    most = pool.config["max_buffers"]
    held = [pool.acquire(2000) for _ in range(most + 2)] + [pool.acquire(10) for _ in range(most)]
    for buffer in held:
        buffer.release()
    equal(free(pool), {1024: most, 4096: most}, "free buffers by class")
    all_of_them = 2 * most + 2
    equal(counts(pool), (0, all_of_them, all_of_them, all_of_them, 2), "hits, misses, allocations, returns, drops")


@check("BUF-05", "buffers")
def releasing_twice_counts_once(subject: Subject) -> None:
    pool = new(subject, "buffers")
    buffer = pool.acquire(10)
    buffer.release()
    buffer.release()
    equal(counts(pool), (0, 1, 1, 1, 0), "hits, misses, allocations, returns, drops after releasing twice")
    equal(free(pool), {1024: 1}, "free buffers after releasing twice")
    first, second = pool.acquire(10), pool.acquire(10)
    buffer.release()  # its memory belongs to the next owner by now
    first.extend(np.ones(4, np.float32))
    second.extend(np.zeros(4, np.float32))
    same(first.values(), np.ones(4, np.float32), "values of a buffer after its former owner released it a second time")
    equal(free(pool), {}, "free buffers after a former owner released a reused buffer a second time")


@check("BUF-06", "buffers")
def prewarming_fills_the_free_list(subject: Subject) -> None:
    pool = new(subject, "buffers")
    most = pool.config["max_buffers"]
    some = max(1, most - 1)
    pool.prewarm(1024, some)
    pool.prewarm(65536, most + 5)
    equal(free(pool), {1024: some, 65536: most}, f"free buffers after prewarm, with max_buffers {most}")
    equal(counts(pool), (0, 0, some + most, 0, 0), "hits, misses, allocations, returns, drops")
    pool.acquire(1000)
    equal(counts(pool), (1, 0, some + most, 0, 0), "hits, misses, allocations, returns, drops after a request")
    pool.prewarm(4096, some)
    pool.prewarm(4096, most)
    equal(free(pool)[4096], most, f"free buffers after prewarm with {some} and with {most}")
    with raises("ConfigError"):
        pool.prewarm(2048, 1)
    pool.clear()
    equal(free(pool), {}, "free buffers after clear")


@check("BUF-07", "buffers")
def the_hit_rate_is_hits_over_requests(subject: Subject) -> None:
    pool = new(subject, "buffers")
    equal(pool.stats().hit_rate, 0.0, "hit rate before the first request")
    pool.prewarm(1024, 1)
    equal(pool.stats().hit_rate, 0.0, "hit rate after prewarm, before the first request")
    for hits, requests in ((1, 1), (1, 2), (1, 3)):
        pool.acquire(1)
        true(abs(pool.stats().hit_rate - hits / requests) < 1e-6, "hit rate", f"{hits} / {requests}", pool.stats().hit_rate)


@check("BUF-09a", "buffers")
def a_buffer_is_never_extended_past_capacity(subject: Subject) -> None:
    buffer = new(subject, "buffers").acquire(1000)
    values = round_to(subject.rng.normal(size=256).astype(np.float32), subject.dtype)
    buffer.extend(values[:100])
    buffer.extend(values[100:255])
    same(buffer.values(), values[:255], "values after two calls of extend")
    with raises("CapacityExceeded"):
        buffer.extend(values[:2])
    equal(buffer.length, 255, "length after CapacityExceeded")
    buffer.extend(values[255:])
    same(buffer.values(), values, "values of a full buffer")


@check("BUF-09b", "buffers")
def a_cleared_buffer_is_empty_and_in_use(subject: Subject) -> None:
    pool = new(subject, "buffers")
    buffer = pool.acquire(1000)
    buffer.extend(np.ones(9, np.float32))
    buffer.clear()
    equal((buffer.length, len(buffer.values())), (0, 0), "length and values after clear")
    equal(pool.stats().returns, 0, "returns in the pool's statistics after clear of a buffer")
    buffer.extend(np.full(2, 3.0, np.float32))
    same(buffer.values(), np.full(2, 3.0, np.float32), "values written after clear")


@check("BUF-09c", "buffers")
def a_released_buffer_refuses_everything(subject: Subject) -> None:
    buffer = new(subject, "buffers").acquire(1000)
    buffer.release()
    for method, arguments in (("extend", (np.ones(1, np.float32),)), ("values", ()), ("clear", ())):
        with raises("BufferReleased"):
            getattr(buffer, method)(*arguments)
