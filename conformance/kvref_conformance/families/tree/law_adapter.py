"""The law adapter of the tree cache: a stream is the committed tokens of one sequence."""

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    unknown_ids,
    wrong_pairs,
    wrong_queries,
)

TWO = 36  # the largest number of tokens of two streams together


class TreeLawAdapter(LawAdapter):
    family = "tree"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **{"num_blocks": max(12, -(-TWO // subject.size("block_size", 3)))} | changes)
        self.sequence = int(self.cache.create())
        self.dropped = False

    def sibling(self) -> "TreeLawAdapter":
        self.subject.require_size(sequences=2)
        other = copy(self)
        other.sequence, other.num_appended = int(self.cache.create()), 0
        return other

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        self.cache.append(self.sequence, keys, values)

    def length(self) -> int:
        return int(self.cache.length(self.sequence))

    def read(self) -> tuple[NDArray, NDArray]:
        return tuple(self.cache.read(self.sequence))

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read", self.sequence)

    def clear(self) -> None:
        self.cache.drop(self.sequence)
        self.sequence, self.num_appended = int(self.cache.create()), 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("num_free_blocks")

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, row, query = self.sequence, random_pair(self.subject, 1), self.query()
        calls: list[BadCall] = [("PositionOutOfRange", "truncate", (sequence, length)) for length in (-1, len(self) + 1)]
        calls += [("PositionOutOfRange", "draft", (sequence, *row, [parent])) for parent in (-2, 0, 1)]
        calls += [("PositionOutOfRange", "attend", (sequence, [node], query, 1.0)) for node in (-2, 0)]
        calls += [("PositionOutOfRange", name, (sequence, node)) for name in ("ancestors", "accept") for node in (-1, 0)]
        for other in unknown_ids(self.subject, sequence):
            calls += [("SequenceNotFound", name, (other,)) for name in ("length", "read", "positions", "reject", "fork", "drop")]
            calls += [("SequenceNotFound", name, (other, 0)) for name in ("ancestors", "accept", "truncate")]
            calls += [("SequenceNotFound", "append", (other, *row)), ("SequenceNotFound", "draft", (other, *row, [-1]))]
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        pairs = [(self.sequence, *pair, [-1] * len(pair[0])) for pair in wrong_pairs(self.subject) if len(pair[0]) == 1]
        return {"draft": pairs, "attend": [(self.sequence, [-1], query, 1.0) for query in wrong_queries(self.subject)]}

    def attend_arguments(self) -> tuple[Any, ...]:
        return self.sequence, [-1]

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", (self.sequence,)), ("positions", (self.sequence,))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        numbers = (*NEGATIVE, LARGEST_JSON_INTEGER)
        yield from (("truncate", (self.sequence, length)) for length in (*numbers, self.room(), 1))
        yield from (("draft", (self.sequence, keys, values, [-1, node, 0, 1, 2])) for node in (*numbers, 1, 4))
        yield from ((name, (self.sequence, node)) for node in numbers for name in ("ancestors", "accept"))
        yield from (("draft", (self.sequence, keys, values, [-1] * 5)) for _ in range(9))
        yield from (("append", (self.sequence, keys, values)), ("accept", (self.sequence, 5)), ("reject", (self.sequence,)))
        for sequence in (-1, LARGEST_JSON_INTEGER, self.sequence, self.sequence):
            self.dropped |= sequence == self.sequence
            yield "drop", (sequence,)

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return self.sequence, length

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        yield self.with_room(tokens)

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        size = self.subject.size("block_size", 16)
        return {"num_blocks": -(-tokens // size) + 1, "block_size": size}

    def room(self) -> int:
        return int(self.config["num_blocks"] * self.config["block_size"])

    def counters(self, appended: int) -> Iterator[Counter]:
        for name, number in self.offered_attributes("num_free_blocks"):
            yield name, number, self.config["num_blocks"]
        if not self.dropped:
            yield "length", self.cache.length(self.sequence), self.room()
