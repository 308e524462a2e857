"""The law adapter of the contiguous cache."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.token_storage import expected_tokens
from kvref_conformance.testlib.fixtures import different_size, random_tokens, supported_formats, to_batch_major
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, TRUNCATABLE, BadCall, Counter, LawAdapter


class ContiguousLawAdapter(LawAdapter):
    family = "contiguous"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        subject.require_size(max_seq_len=14)  # the laws append up to 14 tokens
        super().__init__(subject, **changes)

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        """Returns the tokens repeated for every sequence of the batch."""
        return np.repeat(to_batch_major(tokens), self.config["batch_size"], axis=0)

    def length(self) -> int:
        return int(self.cache.seq_len)

    def read(self) -> tuple[NDArray, NDArray]:
        keys, values = self.cache.read()
        return keys[0].transpose(1, 0, 2), values[0].transpose(1, 0, 2)

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        return expected_tokens(keys, self.config["dtype"]), expected_tokens(values, self.config["dtype"])

    def clear(self) -> None:
        self.cache.reset()
        self.num_appended = 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        return self.offered_attributes("capacity")

    def out_of_range_calls(self) -> list[BadCall]:
        most, rows, subject = self.config["max_seq_len"] + 1, self.config["batch_size"], self.subject
        calls: list[BadCall] = [("CapacityExceeded", "advance", (most,))]
        calls += [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]
        calls += [("RowOutOfRange", "reorder", ([*range(rows - 1), row],)) for row in (-1, rows)]
        if subject.size("tokens", count := most - len(self)) == count:  # in one call: of several, the first would succeed
            over = self.to_cache_layout(np.zeros((count, subject.heads, subject.dim), np.float32))
            calls += [("CapacityExceeded", "append", (over, over))]
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        subject = self.subject
        good, wide = random_tokens(subject, 1), random_tokens(subject, 1, dim=subject.dim + 1)
        few_heads = random_tokens(subject, 1, heads=different_size(subject.heads))
        fused = [np.stack([self.to_cache_layout(part)] * parts) for part, parts in ((wide, 2), (few_heads, 2), (good, 3))]
        return {"append_fused": [(each,) for each in (*fused, self.to_cache_layout(good))]}

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        yield from (("advance", (count,)) for count in (*NEGATIVE, LARGEST_JSON_INTEGER))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room()))
        yield from (("reset", ()), ("reset", ()), ("advance", (-1,)), ("truncate", (1,)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for name in supported_formats(self.subject, "dtype", *PLAIN_FORMATS):
            yield self.with_room(tokens, dtype=name)

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_seq_len": tokens, "initial_capacity": 16}

    def room(self) -> int:
        return int(self.cache.config["max_seq_len"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "seq_len", self.cache.seq_len, self.config["max_seq_len"]
