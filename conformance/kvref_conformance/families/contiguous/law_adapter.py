"""The law adapter of the contiguous cache."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.token_storage import tokens_as
from kvref_conformance.testlib.fixtures import batch_major, different_size, formats_of, random_tokens
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, TRUNCATABLE, BadCall, Counter, LawAdapter


class ContiguousLawAdapter(LawAdapter):
    family = "contiguous"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        subject.need(max_seq_len=14)  # the laws append up to 14 tokens
        super().__init__(subject, **changes)

    def laid_out(self, tokens: NDArray) -> NDArray:
        """Returns the tokens repeated for every sequence of the batch."""
        return np.repeat(batch_major(tokens), self.config["batch_size"], axis=0)

    def length(self) -> int:
        return int(self.cache.seq_len)

    def read(self) -> tuple[NDArray, NDArray]:
        keys, values = self.cache.read()
        return keys[0].transpose(1, 0, 2), values[0].transpose(1, 0, 2)

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        return tokens_as(keys, self.config["dtype"]), tokens_as(values, self.config["dtype"])

    def forget(self) -> None:
        self.cache.reset()
        self.taken = 0

    def numbers(self) -> Iterable[tuple[str, Any]]:
        return self.attributes("capacity")

    def out_of_range(self) -> list[BadCall]:
        most, rows, subject = self.config["max_seq_len"] + 1, self.config["batch_size"], self.subject
        calls: list[BadCall] = [("CapacityExceeded", "advance", (most,))]
        calls += [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]
        calls += [("RowOutOfRange", "reorder", ([*range(rows - 1), row],)) for row in (-1, rows)]
        if subject.size("tokens", count := most - len(self)) == count:  # in one call: of several, the first would succeed
            over = self.laid_out(np.zeros((count, subject.heads, subject.dim), np.float32))
            calls += [("CapacityExceeded", "append", (over, over))]
        return calls

    def other_ways_in(self) -> dict[str, list[tuple[Any, ...]]]:
        subject = self.subject
        good, wide = random_tokens(subject, 1), random_tokens(subject, 1, dim=subject.dim + 1)
        few_heads = random_tokens(subject, 1, heads=different_size(subject.heads))
        fused = [np.stack([self.laid_out(part)] * parts) for part, parts in ((wide, 2), (few_heads, 2), (good, 3))]
        return {"append_fused": [(each,) for each in (*fused, self.laid_out(good))]}

    def wrong_use(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        yield from (("advance", (count,)) for count in (*NEGATIVE, LARGEST_JSON_INTEGER))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room()))
        yield from (("reset", ()), ("reset", ()), ("advance", (-1,)), ("truncate", (1,)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for name in formats_of(self.subject, "dtype", *PLAIN):
            yield self.with_room(tokens, dtype=name)

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_seq_len": tokens, "initial_capacity": 16}

    def room(self) -> int:
        return int(self.cache.config["max_seq_len"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "seq_len", self.cache.seq_len, self.config["max_seq_len"]
