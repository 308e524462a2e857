"""The family `buffers`: the buffer pool with size classes, and its buffers."""

from collections.abc import Iterator
from typing import Any, Protocol

from kvref_conformance.families import Family
from kvref_conformance.implementation_api import Numbers, Statistics
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="buffers",
    chapter="buffers",
    small={"max_buffers": 4},
    speaks_for=("LAW-05", "LAW-12", "LAW-16", *(f"BUF-{n:02}" for n in (*range(1, 8), 9))),
    gives={"acquire": "buffer"},
)


# The typed protocols of the buffer pool and of its buffers.

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "acquire": "BufferTooLarge PositionOutOfRange",
    "prewarm": "ConfigError PositionOutOfRange",
    "buffer.address": "BufferReleased",
    "buffer.extend": "ShapeMismatch DtypeMismatch CapacityExceeded BufferReleased",
    "buffer.values": "BufferReleased",
    "buffer.clear": "BufferReleased",
}


class HeldBuffer(Protocol):
    """The object that `buffers.acquire` returns. Requests name its operations `buffer.NAME`."""

    size: int
    capacity: int
    length: int
    address: int | None

    def extend(self, values: Numbers) -> None: ...
    def values(self) -> Numbers: ...
    def clear(self) -> None: ...
    def release(self) -> None: ...


class BufferStats(Statistics, Protocol):
    hits: int
    misses: int
    allocations: int
    returns: int
    drops: int
    hit_rate: float
    free: dict[int, int]  # size class -> number of free buffers


class Buffers(Protocol):
    def acquire(self, num_bytes: int) -> HeldBuffer: ...
    def prewarm(self, size: int, count: int) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> BufferStats: ...


HANDED_OUT = {"buffer": HeldBuffer}  # name in a request -> protocol


class BuffersFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self, *, max_buffers: int) -> Buffers: ...


def counters_of(stats: Any, max_buffers: int) -> Iterator[tuple[str, Any, float]]:
    """Yields the statistics of a pool with their upper bounds (testlib.law_adapter.Counter)."""
    requests, free = stats.hits + stats.misses, dict(stats.free)
    yield from ((name, getattr(stats, name), requests) for name in ("hits", "misses", "returns"))
    yield "drops", stats.drops, stats.returns
    yield from ((f"free buffers of {size} bytes", count, max_buffers) for size, count in free.items())
    yield "free buffers", sum(free.values()), stats.allocations
    yield "hit_rate", stats.hit_rate, 1.0


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    return {
        **on_family("buffers", {
            "acquire": args(num_bytes=4 * sizes.dim), "prewarm": args(size=1024, count=1), "stats": args(), "clear": args(),
        }),
        **on_family("buffer", {
            "size": args(), "capacity": args(), "length": args(), "address": args(),
            "extend": args(values=counting_rows(sizes.dim)), "values": args(),
            "clear": args(), "release": args(),
        }),
    }  # fmt: skip
