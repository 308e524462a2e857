"""The law adapter of the transfer cache: a stream is one sequence, whose layers all contain the same tokens."""

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import different_size, random_pair
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    unknown_ids,
    wrong_pairs,
)

TWO = 36  # the largest number of tokens of two streams together


def ranks_for(subject: Subject, heads: int) -> int:
    """The requested number of ranks, or the next smaller one that the limits allow and that divides this number of heads."""
    wanted = subject.size("head_ranks", 2)
    allowed = (ranks for ranks in range(wanted, 0, -1) if subject.limits.limit("transfer", "head_ranks").allows(ranks))
    return next((ranks for ranks in allowed if heads % ranks == 0), wanted)


class TransferLawAdapter(LawAdapter):
    family = "transfer"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        if "num_kv_heads" in changes and "head_ranks" not in changes:
            changes["head_ranks"] = ranks_for(subject, subject.size("num_kv_heads", changes["num_kv_heads"]))
        entries = max(12, -(-TWO // subject.size("block_size", 3)))
        super().__init__(subject, **{"num_blocks": entries * subject.size("num_layers", 2)} | changes)
        self.sequence = int(self.cache.create())

    def sibling(self) -> "TransferLawAdapter":
        self.subject.require_size(sequences=2)
        other = copy(self)
        other.sequence, other.num_appended = int(self.cache.create()), 0
        return other

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        return np.stack([tokens] * self.config["num_layers"])

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        self.cache.append(self.sequence, keys, values)

    def length(self) -> int:
        return int(self.cache.length(self.sequence))

    def read(self) -> tuple[NDArray, NDArray]:
        return tuple(self.cache.gather(self.sequence, 0))

    def read_unconverted(self) -> Any:
        return self.cache.as_is("gather", self.sequence, 0)

    def clear(self) -> None:
        self.cache.drop(self.sequence)
        self.sequence, self.num_appended = int(self.cache.create()), 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("num_free_blocks", "num_sequences")

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, row = self.sequence, random_pair(self.subject, 1)
        every = [0, self.config["num_kv_heads"]]
        calls: list[BadCall] = [("LayerOutOfRange", "gather", (sequence, layer)) for layer in (-1, self.config["num_layers"])]
        calls += [("PositionOutOfRange", "truncate", (sequence, wrong)) for wrong in (-1, len(self) + 1)]
        calls += [("OutOfBlocks", "begin", (self.room() + 1,)), ("PositionOutOfRange", "begin", (-1,))]
        for other in unknown_ids(self.subject, sequence):
            calls += [("SequenceNotFound", name, (other,)) for name in ("length", "drop", "export")]
            calls += [("SequenceNotFound", "gather", (other, 0))]
        for other in unknown_ids(self.subject, 0):
            calls += [("TransferNotFound", name, (other,)) for name in ("commit", "abort", "fence")]
            calls += [("TransferNotFound", name, (other, 0, 0, every, *row)) for name in ("arrive", "write_late")]
            calls += [("ExportNotFound", "release", (other,)), ("ExportNotFound", "send", (other, 0, [0, 0], every))]
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        transfer = self.cache.begin(3)
        every = [0, self.config["num_kv_heads"]]
        pairs = [pair for pair in wrong_pairs(self.subject) if not len(pair[0]) == len(pair[1]) == 2]
        return {"arrive": [(transfer, 0, 0, every, *pair) for pair in pairs]}

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("gather", (self.sequence, 0))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        step = self.to_cache_layout(keys), self.to_cache_layout(values)
        every, sequence = [0, self.config["num_kv_heads"]], self.sequence
        yield from (("append", (sequence, *step)) for _ in range(9))
        yield from (("truncate", (sequence, length)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("begin", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, 5, 0, 7))
        for transfer in (*NEGATIVE, LARGEST_JSON_INTEGER, 0, 1):
            yield from (("arrive", (transfer, layer, start, every, keys, values)) for layer in (0, -1) for start in (0, 3, -1))
            yield from ((name, (transfer,)) for name in ("commit", "abort", "abort", "commit"))
            yield "write_late", (transfer, 0, 0, every, keys, values)
            yield from (("fence", (transfer,)) for _ in range(2))
        yield from (("expire", (now,)) for now in (*NEGATIVE, LARGEST_JSON_INTEGER))
        yield from (("append", (sequence, step[0], step[1][:, : different_size(5)])), ("export", (sequence,)))
        yield from (("send", (handle, 0, span, every)) for handle in (*NEGATIVE, 0, 1) for span in ([0, 1], [1, 0], [-1, 1]))
        yield from (("release", (handle,)) for handle in (*NEGATIVE, LARGEST_JSON_INTEGER, 0, 0))

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return (self.sequence, length)

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for ranks in (1, 2):
            if self.config["num_kv_heads"] % (given := self.subject.size("head_ranks", ranks)) == 0:
                yield self.with_room(tokens, head_ranks=given)

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        size, layers = self.subject.size("block_size", 16), self.subject.size("num_layers", 2)
        return {"block_size": size, "num_blocks": -(-tokens // size) * layers}

    def room(self) -> int:
        return int(self.config["num_blocks"] // self.config["num_layers"] * self.config["block_size"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "num_free_blocks", self.cache.num_free_blocks, self.config["num_blocks"]
        committed = 2 if self.config["num_layers"] == 1 else 1  # the parts of `invalid_calls` are complete in one layer
        yield "num_sequences", self.cache.num_sequences, 1 + committed
