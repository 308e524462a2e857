"""The reference model of the cache that quantizes keys per channel: the tokens, and their groups, each quantized once."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import attended, wrong_query
from kvref_conformance.oracle.expectations import (  # fmt: skip
    AcceptedOrError,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    Wrong,
    exactly,
    finite,
    float32,
    not_finite,
    not_in_range,
    tokens_of,
    wrong_arrays,
)
from kvref_conformance.oracle.formats.kivi import cache_bytes, counts, joined, key_groups
from kvref_conformance.oracle.formats.per_group import scale_dtype
from kvref_conformance.oracle.formats.per_row import ExpectedReads, read_as
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import Look, ReferenceModel

LARGE = {"float32": 2.0**126, "bfloat16": 2.0**126, "float16": 65520.0}  # groups may not be able to store larger numbers


class Channels(ReferenceModel):
    family = "channels"
    blamed: ClassVar = {
        **{("clear", seen): "LAW-05" for seen in ("length", "read", "quantized_keys", "quantized_values")},
        **{("truncate", seen): "KIVI-08" for seen in ("length", "read", "quantized_keys", "quantized_values")},
        "length": "KIVI-05", "quantized_keys": "KIVI-02", "quantized_values": "KIVI-02", "memory_bytes": "KIVI-05",
    }  # fmt: skip

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, max_tokens: int, residual: int, format: str, dtype: str, rollback: int
    ) -> None:
        super().__init__()
        self.row, self.room, self.residual = (num_kv_heads, head_dim), max_tokens, residual
        self.format, self.dtype, self.rollback = format, dtype, rollback
        none = np.zeros((0, *self.row), np.float32)
        self.keys, self.values = none, none  # rounded to `dtype`
        self.quantized = exactly(none), exactly(none)  # the values that quantized keys and values read as
        self.largest_length = 0  # the largest length so far
        self.last_count = self.quantized_before = 0  # tokens of the last append, and tokens quantized before it
        self.truncated = False  # some tokens were truncated, but not all
        self.unknown = False  # a token was accepted that may be rejected: no clause says how it reads

    def __len__(self) -> int:
        return len(self.keys)

    def looks(self) -> list[Look]:
        names = ("length", "quantized_keys", "quantized_values", "memory_bytes")
        return [*((name, {}) for name in names), ("read", {"positions": list(range(len(self)))})]

    def length(self) -> Expectation:
        return ExactValue(self.blame("length"), value=len(self))

    def quantized_keys(self) -> Expectation:
        return ExactValue(self.blame("quantized_keys"), value=len(self.quantized[0].values))

    def quantized_values(self) -> Expectation:
        return ExactValue(self.blame("quantized_values"), value=len(self.quantized[1].values))

    def memory_bytes(self) -> Expectation:
        return ExactValue("KIVI-05", value=cache_bytes(len(self), *self.row, self.residual, self.format, self.dtype))

    def append(self, keys: Any, values: Any) -> Expectation:
        arrays = (keys, (None, *self.row)), (values, (None, *self.row))
        rounded = [round_to(float32(part), self.dtype) for part in (keys, values)]
        too_many = [("CapacityExceeded", "KIVI-07")] if len(self) + tokens_of(*arrays) > self.room else []
        if wrong := wrong_arrays(*arrays) + too_many:
            return self.refuse(wrong + self._unstorable(rounded))

        def change(ok: Any) -> None:
            self._append(rounded[0], rounded[1])

        def accept_unknown(ok: Any) -> None:
            self.unknown = True
            self._append(*(np.zeros_like(part) for part in rounded))

        if not finite(*rounded):
            return self.refuse([("NonFinite", "KIVI-06")])
        if self._unstorable(rounded):
            return AcceptedOrError("KIVI-06", self.did("append", accept_unknown), refused=lambda: self.did("refused")(None))
        return Expectation("KIVI-06" if self.unknown else "KIVI-07", self.did("append", change))

    def _unstorable(self, rounded: Sequence[NDArray]) -> Wrong:
        """Returns the errors that these numbers, rounded to `dtype`, permit in addition to those of the call."""
        large = any(np.abs(part).max(initial=0) >= LARGE[scale_dtype(self.format)] for part in rounded)
        return [("NonFinite", "KIVI-06")] if large else not_finite(*rounded)

    def _append(self, keys: NDArray, values: NDArray) -> None:
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        self.last_count, self.largest_length = len(keys), max(self.largest_length, len(self))
        old_keys, old_values = (len(part.values) for part in self.quantized)
        self.quantized_before = min(old_keys, old_values)
        new_keys, new_values = counts(len(self), self.residual)
        more = key_groups(self.keys[old_keys:new_keys], self.format), read_as(self.values[old_values:new_values], self.format)
        self.quantized = joined(self.quantized[0], more[0]), joined(self.quantized[1], more[1])

    def read(self, positions: Sequence[int]) -> Expectation:
        wrong = [each for p in positions for each in not_in_range(p, len(self), "PositionOutOfRange", "LAW-05")]
        if wrong:
            return self.refuse(wrong)
        if self.unknown:
            return UnjudgedReply("LAW-14")
        chosen = list(positions)
        parts = [ExpectedReads(part.values[chosen], part.slack[chosen]) for part in self._reads()]

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            position = chosen[index[0]]
            if self.last != "append":
                return self.blame("read")
            if self.truncated:
                return "KIVI-08"
            if position >= max(counts(len(self), self.residual)):
                return "LAW-04" if position >= len(self) - self.last_count else "KIVI-02"
            return "KIVI-03" if position < self.quantized_before else "KIVI-01"

        return ExpectedArrays("KIVI-01", names=("keys", "values"), parts=(parts[0], parts[1]), clause_at=clause_at)

    def _reads(self) -> tuple[ExpectedReads, ExpectedReads]:
        keys, values = self.quantized
        full = exactly(self.keys[len(keys.values) :]), exactly(self.values[len(values.values) :])
        return joined(keys, full[0]), joined(values, full[1])

    def attend(self, query: Any, scale: float) -> Expectation:
        if wrong := wrong_query(query, *self.row):
            return self.refuse(wrong)
        return UnjudgedReply("ATTN-10") if self.unknown else attended("ATTN-10", query, *self._reads(), scale)

    def truncate(self, length: Any) -> Expectation:
        if wrong := not_in_range(length, len(self) + 1, "PositionOutOfRange", "EDIT-02"):
            return self.refuse(wrong)

        def change(ok: Any) -> None:
            quantized = counts(length, self.residual)
            self.keys, self.values = self.keys[:length], self.values[:length]
            keys, values = (
                ExpectedReads(part.values[:count], part.slack[:count])
                for part, count in zip(self.quantized, quantized, strict=True)
            )
            self.quantized = keys, values
            self.largest_length, self.truncated = (self.largest_length, True) if length else (0, False)
            self.unknown = self.unknown and length > 0

        then = self.did("truncate", change)
        if length in (0, len(self)) or self.largest_length < self.residual or length >= self.largest_length - self.rollback:
            return Expectation("EDIT-02" if length == len(self) else "KIVI-08", then)
        return AcceptedOrError("KIVI-08", then, kinds=("NotTruncatable",), refused=lambda: self.did("refused")(None))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            none = np.zeros((0, *self.row), np.float32)
            self.keys, self.values, self.quantized = none, none, (exactly(none), exactly(none))
            self.largest_length, self.truncated, self.unknown = 0, False, False

        return Expectation("LAW-05", self.did("clear", change))
