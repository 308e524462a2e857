"""What a pool of buffers counts, and the most that each number can be."""

from collections.abc import Iterator
from typing import Any

from kvref_conformance.checking.counts import Counter


def counters_of(stats: Any, max_buffers: int) -> Iterator[Counter]:
    requests = stats.hits + stats.misses
    yield "hits, of the requests", stats.hits, requests
    yield "misses, of the requests", stats.misses, requests
    yield "returns, of the requests", stats.returns, requests
    yield "drops, of the returns", stats.drops, stats.returns
    yield from ((f"free buffers of {size}", count, max_buffers) for size, count in dict(stats.free).items())
    yield "free buffers, of the allocations", sum(dict(stats.free).values()), stats.allocations
    yield "hit_rate", stats.hit_rate, 1.0
