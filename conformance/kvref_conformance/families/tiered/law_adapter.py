"""Adapter through which the laws use the tiered cache."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvref_conformance.families.tiered.tier_model import reads_by_age
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import AFFINE_FORMATS, PLAIN_FORMATS, SYMMETRIC_FORMATS, dim_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.testlib.fixtures import one_format_per_kind, random_pair, supported_formats
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    wrong_queries,
)


class TieredLawAdapter(LawAdapter):
    family = "tiered"

    def save_unconverted(self) -> Any:
        return self.cache.as_is("save")

    def load(self, data: Any) -> None:
        self.cache.load(data)

    def length(self) -> int:
        return int(self.cache.total_tokens)

    def quantizing_streams(self) -> Iterator[LawAdapter]:
        for name in supported_formats(self.subject, "store_format", *AFFINE_FORMATS):
            yield self.new_cache(tail_length=0, store_format=name)

    def scaled_format_streams(self) -> Iterator[LawAdapter]:
        for name in one_format_per_kind(self.subject, "store_format"):
            yield self.new_cache(tail_length=1, store_format=name, head_dim=dim_of(name))

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read")

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        return reads_by_age(keys, self.cache.config), reads_by_age(values, self.cache.config)

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        stats = self.cache.stats()
        return [(name, getattr(stats, name)) for name in ("tail_tokens", "store_tokens", "tail_bytes", "store_bytes")]

    def out_of_range_calls(self) -> list[BadCall]:
        calls: list[BadCall] = [("PositionOutOfRange", "tier_of", (position,)) for position in (-1, len(self))]
        return calls + [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        return {"attend": [(query, 1.0) for query in wrong_queries(self.subject)]}

    def attend_arguments(self) -> tuple[Any, ...]:
        return ()

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", ())]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        yield from (("append", (keys, values)) for _ in range(5))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])), ("truncate", (1,)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        def formats(name: str) -> list[str]:
            return supported_formats(
                self.subject, name, *(PLAIN_FORMATS if name == "tail_dtype" else (*AFFINE_FORMATS, *SYMMETRIC_FORMATS))
            )

        policies: list[dict[str, Any]] = [{"tail_length": tokens, "tail_dtype": name} for name in formats("tail_dtype")]
        policies += [{"tail_length": 0, "warm_length": 0, "store_format": name} for name in formats("store_format")]
        policies += [{"tail_length": 0, "warm_length": tokens, "warm_format": name} for name in formats("warm_format")]
        for policy in policies:
            stream = self.with_room(tokens, **{"max_tokens": tokens + 20, "warm_length": 2} | policy)
            newest = next(stream.config[name] for name in ("tail_length", "warm_length", "max_tokens") if stream.config[name])
            if newest >= tokens:  # otherwise a token migrates, and its truncation may raise NotTruncatable
                yield stream

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        tail, warm = min(256, tokens // 2), min(64, tokens // 4)
        return {"max_tokens": tokens, "tail_length": tail, "warm_length": warm, "migration_batch": 64}

    def room(self) -> int:
        return int(self.cache.config["max_tokens"])

    def counters(self, appended: int) -> Iterator[Counter]:
        stats, heads = self.cache.stats(), self.config["num_kv_heads"]
        most = 8 * heads * (self.config["head_dim"] + 2)  # bytes per token: float32, or fewer with a scale and a zero per row
        yield "total_tokens", stats.total_tokens, appended
        for tier in ("tail", "warm", "store"):
            yield f"{tier}_tokens", getattr(stats, f"{tier}_tokens"), stats.total_tokens
            yield f"{tier}_bytes", getattr(stats, f"{tier}_bytes"), most * stats.total_tokens
