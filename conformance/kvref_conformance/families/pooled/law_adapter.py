"""The law adapter of the pooled cache."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvref_conformance.families.buffers import counters_of
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.law_adapter import Counter, LawAdapter


class PooledLawAdapter(LawAdapter):
    family = "pooled"

    def length(self) -> int:
        return int(self.cache.total_tokens)

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read")

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        stats = self.cache.stats()
        return [(name, getattr(stats, name)) for name in ("num_blocks", "bytes")]

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", ())]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        yield from (("append", (keys, values)) for _ in range(5))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])))

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens, "tokens_per_block": 16}

    def room(self) -> int:
        return int(self.cache.config["max_tokens"])

    def counters(self, appended: int) -> Iterator[Counter]:
        stats = self.cache.stats()
        yield "total_tokens", stats.total_tokens, appended
        yield "num_blocks", stats.num_blocks, stats.total_tokens
        yield from counters_of(stats.pool, stats.pool.allocations)
