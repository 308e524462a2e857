"""The law adapter of the cache that quantizes keys per channel."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.oracle.formats.kivi import expected_reads
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.testlib.fixtures import different_size, random_pair, random_tokens
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, TRUNCATABLE, BadCall, Counter, LawAdapter

COUNTS = ("quantized_keys", "quantized_values", "memory_bytes")


class ChannelsLawAdapter(LawAdapter):
    family = "channels"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        """Rounds a head_dim up to a multiple of 32, the smallest group."""
        if "head_dim" in changes:
            changes["head_dim"] += -changes["head_dim"] % 32
        super().__init__(subject, **changes)

    @property
    def row(self) -> tuple[int, int]:
        return self.config["num_kv_heads"], self.config["head_dim"]

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        return random_pair(self.subject, count, *self.row)

    def length(self) -> int:
        return int(self.cache.length)

    def read(self) -> tuple[NDArray, NDArray]:
        return tuple(self.cache.read(list(range(len(self)))))

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read", [0, 1])

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        return expected_reads(keys, values, *(self.config[name] for name in ("residual", "format", "dtype")))

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes(*COUNTS)

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        (heads, dim), count = self.row, self.subject.size("tokens", 2)
        good, more = self._of(count, heads, dim), self._of(count + 1, heads, dim)
        few_heads, wide, narrow = (
            self._of(count, *each) for each in ((different_size(heads), dim), (heads, dim + 1), (heads, different_size(dim)))
        )
        bad = [(few_heads, few_heads), (wide, wide), (narrow, narrow), (good, narrow), (good, few_heads)]
        bad += [(good, more)] if self.subject.size("tokens", count + 1) > count else []
        return [*bad, (good.reshape(-1), good.reshape(-1)), (good[None], good[None]), (good[..., 0], good[..., 0])]

    def _of(self, count: int, heads: int, dim: int) -> NDArray:
        return random_tokens(self.subject, count, heads, dim)

    def out_of_range_calls(self) -> list[BadCall]:
        calls: list[BadCall] = [("PositionOutOfRange", "read", ([0, position],)) for position in (-1, len(self))]
        calls += [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]
        count = self.room() - len(self) + 1
        if self.subject.size("tokens", count) == count:  # in one call: of several, the first would succeed
            over = np.zeros((count, *self.row), np.float32)
            calls.append(("CapacityExceeded", "append", (over, over)))
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        heads, dim = self.row
        wrong = [self._of(1, heads, dim + 1), self._of(1, heads, dim)[0]]
        wrong += [self._of(1, heads + 1, dim)] if heads > 1 else []
        return {"attend": [(query, 1.0) for query in wrong]}

    def attend_arguments(self) -> tuple[Any, ...]:
        return ()

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", (list(range(len(self))),))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = self.tokens(5)
        yield from (("append", (keys, values)) for _ in range(3))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])), ("truncate", (1,)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        group = group_of(self.config["format"])
        residual = tokens + -tokens % group
        stream = self.new_cache(residual=residual, max_tokens=2 * residual)
        if stream.config["residual"] > tokens:  # otherwise tokens are quantized, and truncate may raise NotTruncatable
            yield stream

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def room(self) -> int:
        return int(self.config["max_tokens"])

    def counters(self, appended: int) -> Iterator[Counter]:
        length = self.cache.length
        yield "length", length, appended
        for name, number in self.offered_attributes("quantized_keys", "quantized_values"):
            yield name, number, length
        for name, number in self.offered_attributes("memory_bytes"):
            yield name, number, 8 * appended * int(np.prod(self.row))
