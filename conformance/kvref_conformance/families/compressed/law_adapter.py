"""The law adapter of the compressed cache: a stream is one sequence, all tokens of which can be read.

Keys are latents, and the window contains all of them. Values are contributions, and all of them are in one incomplete group. All
gates are 1.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import different_size, random_tokens
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    unknown_ids,
)

ROOM = 40  # tokens of a stream


class CompressedLawAdapter(LawAdapter):
    family = "compressed"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **self._sizes(ROOM) | changes)
        self.sequence = int(self.cache.create())
        self.dropped = False

    def sibling(self) -> "CompressedLawAdapter":
        self.subject.require_size(sequences=2)
        beside = copy(self)
        beside.sequence, beside.num_appended = int(self.cache.create()), 0
        return beside

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        latents, contributions = (random_tokens(self.subject, count, 1, self.config["head_dim"]) for _ in range(2))
        return latents, contributions

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        return tokens[:, 0]

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        shape = np.shape(values.array if isinstance(values, OwnArray) else values)
        self.cache.append(self.sequence, keys, values, np.ones(shape, np.float32))

    def require_room(self, count: int) -> None:
        if (wanted := self.num_appended + count) > self.room():
            raise NotOffered(f"a window and a group of {wanted} tokens, where its limits leave {self.room()}")

    def length(self) -> int:
        return int(self.cache.length(self.sequence))

    def read(self) -> tuple[NDArray, NDArray]:
        window, (contributions, _) = self.cache.read_window(self.sequence), self.cache.read_state(self.sequence)
        return np.asarray(window)[:, None], np.asarray(contributions)[:, None]

    def read_unconverted(self) -> Any:
        contributions, _ = self.cache.as_is("read_state", self.sequence)
        return self.cache.as_is("read_window", self.sequence)[:, None, :], contributions[:, None, :]

    def clear(self) -> None:
        self.cache.drop(self.sequence)
        self.sequence, self.num_appended = int(self.cache.create()), 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("num_free_blocks")
        yield "rows", np.asarray(self.cache.read_rows(self.sequence)).tolist()
        yield "gates", np.asarray(self.cache.read_state(self.sequence)[1]).tolist()

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        count, dim = self.subject.size("tokens", 2), self.config["head_dim"]
        good, wide, narrow = (self._rows(count, width) for width in (dim, dim + 1, different_size(dim)))
        bad = [(wide, wide), (narrow, narrow), (good, wide), (narrow, good)]
        if self.subject.size("tokens", count + 1) > count:
            bad += [(good, self._rows(count + 1, dim)), (self._rows(count + 1, dim), good)]
        return [*bad, (good.reshape(-1), good.reshape(-1)), (good[None], good[None]), (good[:, 0], good[:, 0])]

    def _rows(self, count: int, width: int) -> NDArray:
        return random_tokens(self.subject, count, 1, width)[:, 0]

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, row = self.sequence, self._rows(1, self.config["head_dim"])
        calls: list[BadCall] = [("PositionOutOfRange", "truncate", (sequence, wrong)) for wrong in (-1, len(self) + 1)]
        names = ("length", "drop", "fork", "read_window", "read_rows", "read_state", "offload")
        for other in unknown_ids(self.subject, sequence):
            calls += [("SequenceNotFound", name, (other,)) for name in names]
            calls += [("SequenceNotFound", "truncate", (other, 0)), ("SequenceNotFound", "append", (other, row, row, row))]
            calls += [("SequenceNotFound", "step", (other, row[:, None], row, row, row))]
        return calls + [
            ("KeyNotFound", name, (other,)) for other in unknown_ids(self.subject, 0) for name in ("restore", "discard")
        ]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        dim = self.config["head_dim"]
        row, two, wide = self._rows(1, dim), self._rows(2, dim), self._rows(1, dim + 1)
        steps = [(query, row, row, row) for query in (wide[:, None], two[:, None], row)]
        steps += [(row[:, None], *arrays) for arrays in ((wide, row, row), (row, two, row), (row, row, wide), (row, row, row[0]))]
        return {"step": [(self.sequence, *each) for each in steps]}

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [(name, (self.sequence,)) for name in ("read_window", "read_rows", "read_state")]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        rows = self._rows(5, self.config["head_dim"])
        yield from (("append", (self.sequence, rows, rows, rows)) for _ in range(9))
        yield from (("append", (self.sequence, rows, rows, rows[:count])) for count in (0, 4))
        yield from (("truncate", (self.sequence, length)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from ((name, (handle,)) for handle in (*NEGATIVE, LARGEST_JSON_INTEGER, 0) for name in ("restore", "discard"))
        for sequence in (-1, LARGEST_JSON_INTEGER, self.sequence, self.sequence):
            self.dropped |= sequence == self.sequence
            yield "drop", (sequence,)

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return (self.sequence, length)

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        yield self.new_cache(**self._sizes(max(tokens, ROOM)) | {"rollback": tokens})

    @staticmethod
    def _sizes(tokens: int) -> dict[str, Any]:
        """The sizes of a cache in which the window and an incomplete group contain all tokens."""
        return {"window": tokens + 1, "ratio": tokens + 1, "max_tokens": tokens}

    def room(self) -> int:
        return int(min(self.config["window"] - 1, self.config["ratio"] - 1, self.config["max_tokens"]))

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "num_free_blocks", self.cache.num_free_blocks, self.config["num_blocks"]
        if not self.dropped:
            yield "length", self.cache.length(self.sequence), appended
