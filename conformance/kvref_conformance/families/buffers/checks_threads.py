"""Checks of BUF-08: a buffer pool and its buffers used by several threads."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from kvref.array import Array
from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.checking.threads import THREADS, in_threads
from kvref_conformance.conversation.exchange import kinds_of
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.buffers.checks import CLASSES, free


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
            same(one.values(), mark, "values of a thread's own buffer")
            one.release()
            two.release()

    in_threads(subject, work)
    stats = pool.stats()
    requests = 2 * THREADS * each
    equal((stats.hits + stats.misses, stats.returns), (requests, requests), "number of requests and of returns")
    equal(free(pool), {1024: stats.allocations - stats.drops}, "free buffers, compared with allocations - drops")


@check("BUF-08a", "buffers")
def threads_may_mix_their_calls(subject: Subject) -> None:
    pool, requests = new(subject, "buffers", max_buffers=8), list[int]()

    def work(thread: int, rng: np.random.Generator) -> None:
        held = list[tuple[Handle, NDArray]]()
        for i in range(60):  # so that bfloat16 can represent every mark
            choice = rng.integers(4)
            if choice == 0 and held:
                buffer, values = held.pop(int(rng.integers(len(held))))
                same(buffer.values(), values, "values of a thread's own buffer")
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
    equal((stats.hits + stats.misses, stats.returns), (len(requests), len(requests)), "number of requests and of returns")
    equal(sum(dict(stats.free).values()), stats.allocations - stats.drops, "free buffers, compared with allocations - drops")


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
    same(rows[np.argsort(rows[:, 0], kind="stable")], want, "values of a buffer that four threads filled, sorted")


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
        same(subject.numpy(owner.values()), np.full(size // 4, 2, np.float32), "values of the buffer's next owner")
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
