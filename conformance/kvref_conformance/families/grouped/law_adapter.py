"""The law adapter of the grouped cache: a stream is one sequence in the last layer, which sees every token.

Every layer gets the same tokens.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.grouped.fixture import groups_of
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import different_size, random_pair, random_tokens
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

TWO = 36  # tokens of two streams together, at most


class GroupedLawAdapter(LawAdapter):
    family = "grouped"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        entries = max(12, -(-TWO // subject.size("block_size", 3)))
        super().__init__(subject, **{"num_blocks": entries * groups_of(subject)} | changes)
        self.layer = self.config["num_layers"] - 1
        self.sequence = int(self.cache.create())
        self.dropped = False

    def sibling(self) -> "GroupedLawAdapter":
        self.subject.require_size(sequences=2)
        if self.room() < TWO:
            said = self.subject.limits.limit(self.family, "num_blocks")
            raise NotOffered(f"blocks for two sequences, where its limits say {said}")
        beside = copy(self)
        beside.sequence, beside.num_appended = int(self.cache.create()), 0
        return beside

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        return np.stack([tokens] * self.config["num_layers"])

    def append_arrays(self, keys: Any, values: Any) -> None:
        self.cache.step(self.sequence, keys, values)

    def length(self) -> int:
        return int(self.cache.length(self.sequence))

    def read(self) -> tuple[NDArray, NDArray]:
        return tuple(self.cache.read(self.sequence, self.layer, list(range(self.length()))))

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read", self.sequence, self.layer, list(range(len(self))))

    def clear(self) -> None:
        self.cache.drop(self.sequence)
        self.sequence, self.num_appended = int(self.cache.create()), 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        """Yields the number of free blocks until a window passes the first token. Afterwards it depends on the sizes of steps."""
        if self.num_appended <= self.config["window"]:
            yield from self.offered_attributes("num_free_blocks")

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, length, layers = self.sequence, len(self), self.config["num_layers"]
        step = [self.to_cache_layout(part) for part in random_pair(self.subject, 1)]
        unknown = unknown_ids(self.subject, sequence)
        calls: list[BadCall] = [("SequenceNotFound", "step", (wrong, *step)) for wrong in unknown]
        for layer in (-1, layers):
            calls += [("LayerOutOfRange", "block_table", (sequence, layer)), ("LayerOutOfRange", "read", (sequence, layer, [0]))]
        calls += [("PositionOutOfRange", "read", (sequence, self.layer, [0, position])) for position in (-1, length)]
        calls += [("PositionOutOfRange", "truncate", (sequence, wrong)) for wrong in (-1, length + 1)]
        calls += [
            ("PositionOutOfRange", "commit", (sequence, [1] * (length + 1))),
            ("TokenOutOfRange", "commit", (sequence, [-1])),
        ]
        calls += [("SequenceNotFound", "commit", (wrong, [])) for wrong in unknown]
        calls += [("SequenceNotFound", name, (wrong,)) for name in ("length", "fork", "drop") for wrong in unknown]
        calls += [("InUse", "reset", ())]
        return calls + [("TokenOutOfRange", name, ([1, -1],)) for name in ("begin", "match")]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        layers, good = self.config["num_layers"], random_tokens(self.subject, 1)
        steps = [(np.stack([key] * layers), np.stack([value] * layers)) for key, value in wrong_pairs(self.subject)[3:]]
        steps = [(keys, values) for keys, values in steps if keys.shape != values.shape]
        return {
            "step": [(self.sequence, *step) for step in [*steps, (np.stack([good] * different_size(layers)),) * 2]],
            "attend": [(self.sequence, self.layer, query, 1.0) for query in wrong_queries(self.subject)],
        }

    def attend_arguments(self) -> tuple[Any, ...]:
        return self.sequence, self.layer

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        at = (self.sequence, self.layer)
        return [("block_table", at), ("read", (*at, list(range(len(self)))))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        step = [self.to_cache_layout(part) for part in random_pair(self.subject, 1)]
        yield from (("truncate", (self.sequence, length)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER))
        yield from (("step", (sequence, *step)) for sequence in NEGATIVE)
        for sequence in (-1, LARGEST_JSON_INTEGER, self.sequence, self.sequence):
            self.dropped |= sequence == self.sequence
            yield "drop", (sequence,)

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        stream = self.with_room(tokens, window=tokens + 1)
        if stream.config["window"] > tokens:  # otherwise blocks are freed, and truncate may raise NotTruncatable
            yield stream

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return self.sequence, length

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        size = self.subject.size("block_size", 16)
        return {"num_blocks": (-(-tokens // size) + 1) * groups_of(self.subject), "block_size": size, "window": 64}

    def room(self) -> int:
        config = self.cache.config
        return int(config["num_blocks"] // config["num_groups"] * config["block_size"])

    def counters(self, appended: int) -> Iterator[Counter]:
        for name, number in self.offered_attributes("num_free_blocks"):
            yield name, number, self.config["num_blocks"]
        if not self.dropped:
            yield "length", self.cache.length(self.sequence), appended
