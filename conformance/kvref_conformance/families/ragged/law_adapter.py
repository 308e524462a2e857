"""The law adapter of the ragged batch. All rows get the same tokens, and the last row is read."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import different_size, random_tokens, to_batch_major
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, BadCall, Counter, LawAdapter


class RaggedLawAdapter(LawAdapter):
    family = "ragged"

    @property
    def last(self) -> int:
        """The row that is read."""
        return int(self.config["batch_size"]) - 1

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        """Tokens [n, heads, dim], repeated for every row."""
        return np.repeat(to_batch_major(tokens), self.config["batch_size"], axis=0)

    def length(self) -> int:
        return int(self.cache.length(self.last))

    def read(self) -> tuple[NDArray, NDArray]:
        keys, values = (part.swapaxes(0, 1) for part in self.cache.read(self.last))
        return keys, values

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read", self.last)

    def clear(self) -> None:
        """Removes all tokens of all rows."""
        self.cache.trim([len(self)] * self.config["batch_size"])
        self.num_appended = 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("batch_size")
        yield "length of row 0", self.cache.length(0)

    def out_of_range_calls(self) -> list[BadCall]:
        rows, length = self.config["batch_size"], len(self)
        calls: list[BadCall] = [("RowOutOfRange", name, (row,)) for name in ("length", "read") for row in (-1, rows)]
        calls += [("RowOutOfRange", "filter", ([*range(rows - 1), row],)) for row in (-1, rows)]
        calls += [("PositionOutOfRange", "trim", ([0] * (rows - 1) + [count],)) for count in (-1, length + 1)]
        good = self.to_cache_layout(random_tokens(self.subject, 2))
        calls += [("PositionOutOfRange", "append", (good, good, [1] * (rows - 1) + [count])) for count in (-1, 3)]
        calls.append(("RowOutOfRange", "filter", ([],)))
        count = self.room() - length + 1
        if self.subject.size("tokens", count) == count:  # in one call: of several, the first would succeed
            over = self.to_cache_layout(np.zeros((count, self.subject.heads, self.subject.dim), np.float32))
            calls.append(("CapacityExceeded", "append", (over, over)))
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        good, *wrong = self.rows_of_wrong_shapes()
        queries = [wrong[0], good[0], good[:-1] if len(good) > 1 else np.concatenate([good, good])]
        return {
            "extend": [(each, each) for each in wrong] + [(good, np.concatenate([good, good]))],
            "attend": [(each, 1.0) for each in queries + ([wrong[1]] if self.subject.heads > 2 else [])],
        }

    def rows_of_wrong_shapes(self) -> list[NDArray]:
        """One token for every row, and arrays that have another head_dim, another number of heads, and no axis of rows."""
        subject = self.subject
        good, wide = random_tokens(subject, 1), random_tokens(subject, 1, dim=subject.dim + 1)
        few_heads = random_tokens(subject, 1, heads=different_size(subject.heads))
        good, wide, few_heads = (self.to_cache_layout(each) for each in (good, wide, few_heads))
        return [good, wide, few_heads, good[0]]

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", (row,)) for row in {0, self.last}]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        rows = self.config["batch_size"]
        yield from (("trim", ([count] * rows,)) for count in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room()))
        yield from (("filter", ([row] * rows,)) for row in (*NEGATIVE, LARGEST_JSON_INTEGER, rows))
        yield from (("length", (-1,)), ("read", (rows,)), ("trim", ([1] * (rows + 1),)))

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def room(self) -> int:
        return int(self.config["max_tokens"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "length", self.cache.length(self.last), min(appended, self.room())
