"""The reference model of the cache that quantizes keys per channel: the tokens, and their groups, each quantized once."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats.kivi import cache_bytes, concatenate_reads, expected_key_groups, quantized_counts
from kvref_conformance.oracle.formats.per_group import scale_dtype
from kvref_conformance.oracle.formats.per_row import ExpectedReads, read_as
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

LARGE = {"float32": 2.0**126, "bfloat16": 2.0**126, "float16": 65520.0}  # groups may not be able to store larger numbers


class Channels(ReferenceModel):
    family = "channels"
    clause_by_observation: ClassVar = {
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
        self.quantized = exact_reads(none), exact_reads(none)  # the values that quantized keys and values read as
        self.largest_length = 0  # the largest length so far
        self.last_count = self.quantized_before = 0  # tokens of the last append, and tokens quantized before it
        self.truncated = False  # some tokens were truncated, but not all
        self.unknown = False  # a token was accepted that may be rejected: no clause says how it reads

    def __len__(self) -> int:
        return len(self.keys)

    def observations(self) -> list[ReadCall]:
        names = ("length", "quantized_keys", "quantized_values", "memory_bytes")
        return [*((name, {}) for name in names), ("read", {"positions": list(range(len(self)))})]

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=len(self))

    def quantized_keys(self) -> Expectation:
        return ExactValue(self.clause_of("quantized_keys"), value=len(self.quantized[0].values))

    def quantized_values(self) -> Expectation:
        return ExactValue(self.clause_of("quantized_values"), value=len(self.quantized[1].values))

    def memory_bytes(self) -> Expectation:
        return ExactValue("KIVI-05", value=cache_bytes(len(self), *self.row, self.residual, self.format, self.dtype))

    def append(self, keys: Any, values: Any) -> Expectation:
        arrays = (keys, (None, *self.row)), (values, (None, *self.row))
        rounded = [round_to(to_float32(part), self.dtype) for part in (keys, values)]
        too_many = [("CapacityExceeded", "KIVI-07")] if len(self) + count_tokens(*arrays) > self.room else []
        if wrong := array_errors(*arrays) + too_many:
            return self.expect_error(wrong + self._unstorable(rounded))

        def change(ok: Any) -> None:
            self._append(rounded[0], rounded[1])

        def accept_unknown(ok: Any) -> None:
            self.unknown = True
            self._append(*(np.zeros_like(part) for part in rounded))

        if not all_finite(*rounded):
            return self.expect_error([("NonFinite", "KIVI-06")])
        if self._unstorable(rounded):
            return AcceptedOrError(
                "KIVI-06", self.on_success("append", accept_unknown), on_error=lambda: self.note_unchanged("refused")
            )
        return Expectation("KIVI-06" if self.unknown else "KIVI-07", self.on_success("append", change))

    def _unstorable(self, rounded: Sequence[NDArray]) -> Errors:
        """Returns the errors that these numbers, rounded to `dtype`, permit in addition to those of the call."""
        large = any(np.abs(part).max(initial=0) >= LARGE[scale_dtype(self.format)] for part in rounded)
        return [("NonFinite", "KIVI-06")] if large else finite_errors(*rounded)

    def _append(self, keys: NDArray, values: NDArray) -> None:
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        self.last_count, self.largest_length = len(keys), max(self.largest_length, len(self))
        old_keys, old_values = (len(part.values) for part in self.quantized)
        self.quantized_before = min(old_keys, old_values)
        new_keys, new_values = quantized_counts(len(self), self.residual)
        more = (
            expected_key_groups(self.keys[old_keys:new_keys], self.format),
            read_as(self.values[old_values:new_values], self.format),
        )
        self.quantized = concatenate_reads(self.quantized[0], more[0]), concatenate_reads(self.quantized[1], more[1])

    def read(self, positions: Sequence[int]) -> Expectation:
        wrong = [each for p in positions for each in range_errors(p, len(self), "PositionOutOfRange", "LAW-05")]
        if wrong:
            return self.expect_error(wrong)
        if self.unknown:
            return UnjudgedReply("LAW-14")
        chosen = list(positions)
        parts = [ExpectedReads(part.values[chosen], part.slack[chosen]) for part in self._reads()]

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            position = chosen[index[0]]
            if self.last_change != "append":
                return self.clause_of("read")
            if self.truncated:
                return "KIVI-08"
            if position >= max(quantized_counts(len(self), self.residual)):
                return "LAW-04" if position >= len(self) - self.last_count else "KIVI-02"
            return "KIVI-03" if position < self.quantized_before else "KIVI-01"

        return ExpectedArrays("KIVI-01", names=("keys", "values"), parts=(parts[0], parts[1]), clause_at=clause_at)

    def _reads(self) -> tuple[ExpectedReads, ExpectedReads]:
        keys, values = self.quantized
        full = exact_reads(self.keys[len(keys.values) :]), exact_reads(self.values[len(values.values) :])
        return concatenate_reads(keys, full[0]), concatenate_reads(values, full[1])

    def attend(self, query: Any, scale: float) -> Expectation:
        if wrong := query_errors(query, *self.row):
            return self.expect_error(wrong)
        return UnjudgedReply("ATTN-10") if self.unknown else expect_attend("ATTN-10", query, *self._reads(), scale)

    def truncate(self, length: Any) -> Expectation:
        if wrong := range_errors(length, len(self) + 1, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            quantized = quantized_counts(length, self.residual)
            self.keys, self.values = self.keys[:length], self.values[:length]
            keys, values = (
                ExpectedReads(part.values[:count], part.slack[:count])
                for part, count in zip(self.quantized, quantized, strict=True)
            )
            self.quantized = keys, values
            self.largest_length, self.truncated = (self.largest_length, True) if length else (0, False)
            self.unknown = self.unknown and length > 0

        then = self.on_success("truncate", change)
        if length in (0, len(self)) or self.largest_length < self.residual or length >= self.largest_length - self.rollback:
            return Expectation("EDIT-02" if length == len(self) else "KIVI-08", then)
        return AcceptedOrError("KIVI-08", then, kinds=("NotTruncatable",), on_error=lambda: self.note_unchanged("refused"))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            none = np.zeros((0, *self.row), np.float32)
            self.keys, self.values, self.quantized = none, none, (exact_reads(none), exact_reads(none))
            self.largest_length, self.truncated, self.unknown = 0, False, False

        return Expectation("LAW-05", self.on_success("clear", change))
