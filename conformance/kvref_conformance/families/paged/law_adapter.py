"""The law adapter of the paged cache: a stream is one sequence in one layer."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered, OperationDeclined
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import dim_of
from kvref_conformance.testlib.fixtures import block_table_of, different_size, one_format_per_kind, random_pair, random_tokens
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

MOVED = 14  # the largest number of tokens of a loaded or replaced sequence
TWO = 36  # the largest number of tokens of two streams together


class PagedLawAdapter(LawAdapter):
    family = "paged"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        entries = max(12, -(-TWO // subject.size("block_size", 3)))
        super().__init__(subject, **{"num_blocks": entries * subject.size("num_layers", 2)} | changes)
        self.sequence, self.layer = self.begun(), 0
        self.dropped = False

    def begun(self) -> int:
        """Creates a sequence."""
        return int(self.cache.create())

    def beside(self, sequence: int, layer: int) -> "PagedLawAdapter":
        """Returns a stream of another sequence or layer of the same cache."""
        other = copy(self)
        other.sequence, other.layer, other.num_appended = sequence, layer, 0
        return other

    def sibling(self) -> "PagedLawAdapter":
        self.subject.require_size(sequences=2)
        if self.room() < TWO:
            raise NotOffered(
                f"blocks for two sequences, where its limits say {self.subject.limits.limit(self.family, 'num_blocks')}"
            )
        return self.beside(self.begun(), 0)

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        self.cache.write(self.sequence, self.layer, len(self), keys, values)

    def overwrite(self, keys: NDArray, values: NDArray) -> None:
        self.cache.write(self.sequence, 0, 0, keys, values)

    def scaled_format_streams(self) -> Iterator[LawAdapter]:
        for name in one_format_per_kind(self.subject, "dtype"):
            yield self.new_cache(dtype=name, head_dim=dim_of(name))

    def save_unconverted(self) -> Any:
        return self.cache.as_is("save", self.sequence)

    def load(self, data: Any) -> None:
        """Loads a saved sequence. Raises NotOffered if there is no room for it next to the present tokens."""
        entries = self.config["num_blocks"] // self.config["num_layers"]
        if self.subject.limits.declared and entries < 2 * -(-MOVED // self.config["block_size"]):
            raise NotOffered(f"room for two sequences of {MOVED} tokens, where its limits leave {self.room()}")
        self.cache.load(self.sequence, data)

    def loading_stream(self) -> LawAdapter:
        size = self.subject.size("block_size", self.config["block_size"] + 1)
        blocks = -(-self.config["num_blocks"] * self.config["block_size"] // size) + self.config["num_layers"]
        return self.new_cache(**self.config | {"block_size": size, "num_blocks": blocks})

    def length(self) -> int:
        return int(self.cache.length(self.sequence, self.layer))

    def read(self) -> tuple[NDArray, NDArray]:
        return tuple(self.cache.gather(self.sequence, self.layer))

    def read_unconverted(self) -> Any:
        try:
            return self.cache.as_is("gather", self.sequence, 0)
        except OperationDeclined:
            return self.cache.as_is("read", self.sequence, 0, list(range(len(self))))

    def clear(self) -> None:
        self.cache.drop(self.sequence)
        self.sequence, self.num_appended = self.begun(), 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("num_free_blocks", "utilization")
        for layer in range(self.config["num_layers"]):
            with suppress(NotOffered):
                yield f"blocks of layer {layer}", len(block_table_of(self.cache, self.sequence, layer))
            yield f"length of layer {layer}", self.cache.length(self.sequence, layer)

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, length = self.sequence, len(self)
        keys, values = random_pair(self.subject, 1)
        calls: list[BadCall] = [
            ("OutOfBlocks", "ensure_capacity", (sequence, self.room() + 1)),
            ("PositionOutOfRange", "ensure_capacity", (sequence, -1)),
            ("PositionOutOfRange", "slot_mapping", (sequence, 0, 0, -1)),
            ("PositionOutOfRange", "write", (sequence, 0, length + 1, keys, values)),
            ("PositionOutOfRange", "write", (sequence, 0, -1, keys, values)),
        ]
        many = random_pair(self.subject, 9)  # would need more blocks
        for layer in (-1, self.config["num_layers"]):
            calls += [("LayerOutOfRange", "write", (sequence, layer, 0, keys, values))]
            calls += [("LayerOutOfRange", "write", (sequence, layer, length, *many))]
            calls += [("LayerOutOfRange", name, (sequence, layer)) for name in ("gather", "length", "block_table")]
            calls += [("LayerOutOfRange", "read", (sequence, layer, [0]))]
        calls += [("PositionOutOfRange", "read", (sequence, 0, [0, position])) for position in (-1, length)]
        unknown = unknown_ids(self.subject, sequence)
        calls += [("SequenceNotFound", "gather", (other, 0)) for other in unknown]
        return calls + [("SequenceNotFound", "write", (other, 0, 0, keys, values)) for other in unknown]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        pairs, queries, good = wrong_pairs(self.subject), wrong_queries(self.subject), random_tokens(self.subject, 1)
        layers = self.config["num_layers"]
        steps = [(np.stack([key] * layers), np.stack([value] * layers)) for key, value in pairs]
        steps += [(np.stack([good] * different_size(layers)),) * 2]
        return {
            "append": [([self.sequence], 0, *pair) for pair in pairs],
            "append_step": [([self.sequence], *pair) for pair in steps],
            "attend": [(self.sequence, 0, query, 1.0) for query in queries],
        }

    def attend_arguments(self) -> tuple[Any, ...]:
        return self.sequence, self.layer

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        at = (self.sequence, self.layer)
        calls: list[tuple[str, tuple[Any, ...]]] = [(name, at) for name in ("gather", "block_table")]
        calls += [(name, ([self.sequence], self.layer)) for name in ("gather_batch", "lengths", "block_tables")]
        calls += [("slot_mapping", (*at, 0, len(self))), ("read", (*at, list(range(len(self)))))]
        return calls

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 1)
        yield from (("ensure_capacity", (self.sequence, count)) for count in (*NEGATIVE, LARGEST_JSON_INTEGER))
        yield from (("write", (self.sequence, 0, start, keys, values)) for start in NEGATIVE)
        for sequence in (-1, LARGEST_JSON_INTEGER, self.sequence, self.sequence):
            self.dropped |= sequence == self.sequence
            yield "drop", (sequence,)

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        yield self.with_room(tokens, num_layers=1)

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return self.sequence, length

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        size = self.subject.size("block_size", 16)
        return {"num_blocks": (-(-tokens // size) + 1) * self.subject.size("num_layers", 2), "block_size": size}

    def room(self) -> int:
        config = self.cache.config
        return int(config["num_blocks"] // config["num_layers"] * config["block_size"])

    def counters(self, appended: int) -> Iterator[Counter]:
        most = {"num_free_blocks": self.config["num_blocks"], "utilization": 1.0}
        for name, number in self.offered_attributes(*most):
            yield name, number, most[name]
        if not self.dropped:
            yield "length", self.cache.length(self.sequence, 0), self.own_room()

    def own_room(self) -> int:
        """Returns the capacity of the sequence, or of the whole pool if block tables are not provided."""
        try:
            return int(self.config["block_size"] * len(block_table_of(self.cache, self.sequence, 0)))
        except NotOffered:
            return self.room()
