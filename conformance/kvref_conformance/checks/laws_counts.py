"""LAW-19, and LAW-11 of counts: wrong use is refused, and no count is ever out of its bounds."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvref_conformance.checking.expect import equal, raises, true
from kvref_conformance.checking.registry import CACHES, check, check_each
from kvref_conformance.checking.setup import DIM, HEADS, blocks_of, new, pair_of_tokens
from kvref_conformance.checking.streams import Stream
from kvref_conformance.drivers.in_process import Handle, Subject
from kvref_conformance.outcome import Broken

MANY = 2**53 - 1  # the largest integer that JSON has everywhere
NEGATIVE = (-1, -3, -MANY)
TOKENS = 11, 29  # handed to a cache first, and at most by `wrong_use`
Counter = tuple[str, Any, float]  # what it counts, the number, the most that there is


def tried(call: Callable[..., Any], *args: Any) -> None:
    """Make a call that may be refused, in whatever words, or not be offered. Raises Broken where none came back from it."""
    try:
        call(*args)
    except Broken:
        raise
    except Exception:
        return


def within_bounds(counters: Iterable[Counter], after: str) -> None:
    for name, number, most in counters:
        true(0 <= number <= most, f"{name} after {after}", f"a number in [0, {most}]", number)


@check("LAW-19", "blocks")
def blocks_are_never_more_than_there_are(subject: Subject) -> None:
    pool = new(subject, "blocks")
    held = [pool.allocate() for _ in range(3)]
    pool.free(held[0])
    wrong = [("free", block) for block in (held[0], held[0], -1, 5, MANY)]
    wrong += [("allocate_many", count) for count in (*NEGATIVE, 6, MANY)]
    for name, number in wrong:
        tried(getattr(pool, name), number)
        within_bounds(_of_pool(pool), f"{name}({number})")
    for _ in range(7):
        tried(pool.allocate)
        within_bounds(_of_pool(pool), "allocating more than there are")


def _of_pool(pool: Handle) -> Iterator[Counter]:
    yield from ((f"{name} of 5", getattr(pool, name), 5) for name in ("num_free", "num_used"))
    yield "utilization", pool.utilization, 1.0


def wrong_use(stream: Stream) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of a cache that no one should make, and most of which have to be refused."""
    if stream.family == "contiguous":
        yield from (("advance", (count,)) for count in (*NEGATIVE, MANY))
        yield from (("reset", ()), ("reset", ()), ("advance", (-1,)))
    elif stream.family == "paged":
        keys, values = pair_of_tokens(stream.subject, 1)
        yield from (("ensure_capacity", (stream.sequence, count)) for count in (*NEGATIVE, MANY))
        yield from (("write", (stream.sequence, 0, start, keys, values)) for start in NEGATIVE)
        yield from (("drop", (sequence,)) for sequence in (-1, MANY, stream.sequence, stream.sequence))
    elif stream.family == "quantized":
        keys, values = pair_of_tokens(stream.subject, 1)
        yield from (("append", (layer, keys, values)) for layer in (*(12 * [0]), -1, 2))
        yield from (("clear", ()), ("clear", ()))
    else:
        keys, values = pair_of_tokens(stream.subject, 5)
        yield from (("append", (keys, values)) for _ in range(5))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])))


def counters(stream: Stream, live: bool) -> Iterator[Counter]:
    """What a cache counts. live: whether the sequence is still there, where there are sequences."""
    cache, family = stream.cache, stream.family
    if family == "paged":
        yield "num_free_blocks", cache.num_free_blocks, 24
        yield "utilization", cache.utilization, 1.0
        if live:
            most = 3 * len(blocks_of(cache, stream.sequence, 0))
            yield "length, of the room in its blocks", cache.length(stream.sequence, 0), most
    elif family == "contiguous":
        yield "seq_len", cache.seq_len, 20
    elif family == "quantized":
        yield from ((f"length of layer {layer}", cache.length(layer), 20) for layer in (0, 1))
    else:
        stats = cache.stats()
        yield "total_tokens", stats.total_tokens, sum(TOKENS)
        if family == "tiered":
            for tier in ("tail", "warm", "store"):
                yield f"{tier}_tokens", getattr(stats, f"{tier}_tokens"), stats.total_tokens
                yield f"{tier}_bytes", getattr(stats, f"{tier}_bytes"), 8 * stats.total_tokens * HEADS * DIM
        else:
            yield "num_blocks", stats.num_blocks, stats.total_tokens
            yield from _of_buffers(stats.pool, 32)


@check_each("LAW-19", *CACHES)
def counters_stay_counters(subject: Subject, family: str) -> None:
    stream, live = Stream(subject, family), True
    stream.append(*pair_of_tokens(subject, TOKENS[0]))
    for name, args in wrong_use(stream):
        tried(getattr(stream.cache, name), *args)
        live = live and (name, args) != ("drop", (stream.sequence,))
        shown = ", ".join(str(arg) for arg in args if isinstance(arg, int))
        within_bounds(counters(stream, live), f"{name}({shown})")


def _of_buffers(stats: Any, max_buffers: int) -> Iterator[Counter]:
    requests = stats.hits + stats.misses
    yield "hits, of the requests", stats.hits, requests
    yield "misses, of the requests", stats.misses, requests
    yield "returns, of the requests", stats.returns, requests
    yield "drops, of the returns", stats.drops, stats.returns
    yield from ((f"free buffers of {size}", count, max_buffers) for size, count in dict(stats.free).items())
    yield "free buffers, of the allocations", sum(dict(stats.free).values()), stats.allocations
    yield "hit_rate", stats.hit_rate, 1.0


@check("LAW-19", "buffers")
def buffers_are_never_more_than_were_made(subject: Subject) -> None:
    pool = new(subject, "buffers")
    wrong: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(pool.prewarm, (1024, 2))]
    wrong += [(pool.prewarm, (1024, count)) for count in NEGATIVE]
    wrong += [(pool.acquire, (count,)) for count in (*NEGATIVE, MANY)]
    buffers = [pool.acquire(10) for _ in range(6)]
    wrong += [(buffer.release, ()) for buffer in buffers for _ in range(2)]
    wrong += [(pool.clear, ()), (buffers[0].release, ()), (pool.clear, ()), (pool.prewarm, (1024, -1))]
    for call, args in wrong:
        tried(call, *args)
        within_bounds(_of_buffers(pool.stats(), 4), f"wrong use, last {args}")


@check("LAW-11", "blocks")
def a_negative_number_of_blocks_is_refused(subject: Subject) -> None:
    pool = new(subject, "blocks")
    pool.allocate()
    for count in NEGATIVE:
        with raises("PositionOutOfRange"):
            pool.allocate_many(count)
        equal((pool.num_free, pool.num_used), (4, 1), f"free and used after allocate_many({count})")


@check("LAW-11", "buffers")
def a_negative_number_of_bytes_or_buffers_is_refused(subject: Subject) -> None:
    pool = new(subject, "buffers")
    for count in NEGATIVE:
        with raises("PositionOutOfRange"):
            pool.acquire(count)
        with raises("PositionOutOfRange"):
            pool.prewarm(1024, count)
    equal(pool.stats().allocations, 0, "allocations after negative numbers of bytes and of buffers")
