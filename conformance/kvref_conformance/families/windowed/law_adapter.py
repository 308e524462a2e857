"""The law adapter of the windowed cache. It stays shorter than the window, so that every token is stored."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import AFFINE_FORMATS, PLAIN_FORMATS, SYMMETRIC_FORMATS, dim_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.token_storage import expected_tokens
from kvref_conformance.testlib.fixtures import one_format_per_kind, random_pair, random_tokens, supported_formats
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    wrong_queries,
)


class WindowedLawAdapter(LawAdapter):
    family = "windowed"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **{"window": 40} | changes)

    def save_unconverted(self) -> Any:
        return self.cache.as_is("save")

    def load(self, data: Any) -> None:
        self.cache.load(data)

    def length(self) -> int:
        return int(self.cache.length)

    def read(self) -> tuple[NDArray, NDArray]:
        return tuple(self.cache.read(list(range(len(self)))))

    def quantizing_streams(self) -> Iterator[LawAdapter]:
        for name in supported_formats(self.subject, "dtype", *SYMMETRIC_FORMATS, *AFFINE_FORMATS):
            yield self.new_cache(dtype=name)

    def scaled_format_streams(self) -> Iterator[LawAdapter]:
        for name in one_format_per_kind(self.subject, "dtype"):
            yield self.new_cache(dtype=name, head_dim=dim_of(name))

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        return expected_tokens(keys, self.config["dtype"]), expected_tokens(values, self.config["dtype"])

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        return ()

    def out_of_range_calls(self) -> list[BadCall]:
        calls: list[BadCall] = [("PositionOutOfRange", "read", ([position],)) for position in (-1, len(self))]
        return calls + [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        wrong, good = wrong_queries(self.subject), random_tokens(self.subject, 1)
        steps = [(query, good, good, 1.0) for query in (*wrong, random_tokens(self.subject, 2))]
        return {"attend": [(query, 1.0) for query in wrong], "step": steps}

    def attend_arguments(self) -> tuple[Any, ...]:
        return ()

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", (list(range(len(self))),))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        yield from (("append", (keys, values)) for _ in range(5))
        yield from (("read", ([position],)) for position in (*NEGATIVE, LARGEST_JSON_INTEGER, 0))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])), ("truncate", (1,)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for name in supported_formats(self.subject, "dtype", *SYMMETRIC_FORMATS, *AFFINE_FORMATS, *PLAIN_FORMATS):
            yield self.with_room(tokens, dtype=name, rollback=tokens)

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"window": tokens}

    def room(self) -> int:
        """One less than the window, which also includes the next query's own token."""
        return int(self.cache.config["window"]) - 1

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "length", self.cache.length, appended
        yield "stored_tokens", self.cache.stored_tokens, appended
