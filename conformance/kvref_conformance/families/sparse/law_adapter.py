"""The law adapter of the sparse cache: a stream is one sequence. Its index keys are computed from its keys."""

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

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
    wrong_queries,
)


class SparseLawAdapter(LawAdapter):
    family = "sparse"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **changes)
        self.sequence = int(self.cache.create())

    def sibling(self) -> "SparseLawAdapter":
        self.subject.require_size(sequences=2)
        other = copy(self)
        other.sequence, other.num_appended = int(self.cache.create()), 0
        return other

    def index_keys(self, keys: NDArray | OwnArray) -> NDArray:
        """An index key per row of `keys`, whatever its shape is."""
        shape = np.shape(keys.array if isinstance(keys, OwnArray) else keys)
        return np.ones((shape[0] if shape else 1, self.config["index_dim"]), np.float32)

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        self.cache.append(self.sequence, keys, values, self.index_keys(keys))

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
        yield "index keys", np.asarray(self.cache.read_index(self.sequence)).tolist()

    def index(self) -> tuple[NDArray, NDArray]:
        """Index queries and weights of one query."""
        return np.ones((1, 2, self.config["index_dim"]), np.float32), np.ones((1, 2), np.float32)

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, row = self.sequence, random_pair(self.subject, 1)
        calls: list[BadCall] = [("PositionOutOfRange", "truncate", (sequence, wrong)) for wrong in (-1, len(self) + 1)]
        for other in unknown_ids(self.subject, sequence):
            calls += [
                ("SequenceNotFound", name, (other,)) for name in ("length", "drop", "fork", "read", "read_index", "offload")
            ]
            calls += [("SequenceNotFound", "select", (other, *self.index())), ("SequenceNotFound", "truncate", (other, 0))]
            calls += [("SequenceNotFound", "append", (other, *row, self.index_keys(row[0])))]
        for other in unknown_ids(self.subject, 0):
            calls += [("KeyNotFound", name, (other,)) for name in ("restore", "discard")]
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        queries, weights = self.index()
        attend = [(self.sequence, query, queries, weights, 1.0) for query in wrong_queries(self.subject)]
        wrong = [
            (queries[:, :1], weights),
            (queries[..., 0], weights),
            (queries, weights[0]),
            (queries, np.ones((2, 2), np.float32)),
        ]
        return {"attend": attend, "select": [(self.sequence, *each) for each in wrong]}

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", (self.sequence,)), ("read_index", (self.sequence,)), ("select", (self.sequence, *self.index()))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        sequence, index_keys = self.sequence, self.index_keys(keys)
        yield from (("append", (sequence, keys, values, index_keys)) for _ in range(30))
        yield from (("truncate", (sequence, length)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from ((name, (handle,)) for handle in (*NEGATIVE, LARGEST_JSON_INTEGER, 0, 0) for name in ("restore", "discard"))
        yield from (("append", (sequence, keys, values, index_keys[:count])) for count in (0, 4))

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return (self.sequence, length)

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        yield self.with_room(tokens)

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        size = self.subject.size("block_size", 16)
        return {"block_size": size, "num_blocks": -(-tokens // size)}

    def room(self) -> int:
        return int(self.config["num_blocks"] * self.config["block_size"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "num_free_blocks", self.cache.num_free_blocks, self.config["num_blocks"]
