"""The counts of a buffer pool and their upper bounds."""

from collections.abc import Iterator
from typing import Any

from kvref_conformance.testlib.law_adapter import Counter


def counters_of(stats: Any, max_buffers: int) -> Iterator[Counter]:
    requests = stats.hits + stats.misses
    yield "hits", stats.hits, requests
    yield "misses", stats.misses, requests
    yield "returns", stats.returns, requests
    yield "drops", stats.drops, stats.returns
    yield from ((f"free buffers of {size} bytes", count, max_buffers) for size, count in dict(stats.free).items())
    yield "free buffers", sum(dict(stats.free).values()), stats.allocations
    yield "hit_rate", stats.hit_rate, 1.0
