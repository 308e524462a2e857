"""The reference model of the contiguous cache: a list with one pair of columns (keys, values) per token."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

SEEN = ("seq_len", "capacity", "read", "raw")


class Contiguous(ReferenceModel):
    family = "contiguous"
    clause_by_observation: ClassVar = {
        ("new", "seq_len"): "CONTIG-01", ("new", "capacity"): "CONTIG-01",
        ("advance", "seq_len"): "CONTIG-10", ("reset", "seq_len"): "CONTIG-11", ("reset", "capacity"): "CONTIG-11",
        ("reset", "read"): "CONTIG-11", ("advance", "read"): "CONTIG-10", ("grown", "read"): "CONTIG-05",
        ("grown", "raw"): "CONTIG-05",
        **{("truncate", seen): "EDIT-01" for seen in SEEN}, **{("reorder", seen): "EDIT-07" for seen in SEEN},
        "seq_len": "CONTIG-02", "capacity": "CONTIG-04", "raw": "CONTIG-07",
    }  # fmt: skip

    def __init__(
        self, *, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> None:
        super().__init__()
        self.sizes = batch_size, num_kv_heads, head_dim
        self.most, self.dtype = max_seq_len, dtype
        self.room = min(initial_capacity, max_seq_len)
        self.reports_capacity = False  # whether it has reported a capacity; otherwise raw buffers can have any length
        self.before, self.appended = 0, (np.zeros((0,)), np.zeros((0,)))  # of the last append: length before it, and its tokens
        self.origins: list[int] = []  # per row: its row before the last reorder
        self.tokens: list[tuple[NDArray, NDArray] | None] = []  # [B, H, D] each; None: unknown, counted by advance

    def observations(self) -> list[ReadCall]:
        return [("seq_len", {}), ("capacity", {}), ("read", {}), ("raw", {})]

    def seq_len(self) -> Expectation:
        return ExactValue(self.clause_of("seq_len"), value=len(self.tokens))

    def capacity(self) -> Expectation:
        def note(ok: Any) -> None:
            self.reports_capacity = True

        return ExactValue(self.clause_of("capacity"), note, value=self.room)

    def append(self, keys: Any, values: Any) -> Expectation:
        return self._append("append", keys, values)

    def append_fused(self, key_values: Any) -> Expectation:
        batch, heads, dim = self.sizes
        argument = key_values, (2, batch, heads, None, dim)
        if wrong := array_errors(argument):
            return self.expect_error(wrong + self._lacks_room(count_tokens(argument)) + finite_errors(key_values))
        return self._append("append_fused", key_values[0], key_values[1])

    def _append(self, name: str, keys: Any, values: Any) -> Expectation:
        batch, heads, dim = self.sizes
        shape = batch, heads, None, dim
        arguments = (keys, shape), (values, shape)
        if wrong := array_errors(*arguments) + self._lacks_room(count_tokens(*arguments)):
            return self.expect_error(wrong + finite_errors(keys, values))
        count = keys.shape[2]
        before, total = len(self.tokens), len(self.tokens) + count

        def change(ok: Any) -> None:
            stored = [round_to(to_float32(part), self.dtype) for part in (keys, values)]
            self.tokens += [(stored[0][:, :, i], stored[1][:, :, i]) for i in range(count)]
            self.before, self.appended = before, (to_float32(keys), to_float32(values))
            while self.room < len(self.tokens):
                self.room = min(max(1, 2 * self.room), self.most)

        then = self.on_success("grown" if total > self.room else name, change)
        clause = "CONTIG-09" if name == "append_fused" else "CONTIG-06" if total == self.most else "CONTIG-02"
        return Expectation(clause, then) if all_finite(keys, values) else AcceptedOrError(clause, then)

    def _lacks_room(self, count: int) -> Errors:
        return [("CapacityExceeded", "CONTIG-06")] if len(self.tokens) + count > self.most else []

    def read(self) -> Expectation:
        return self._arrays("read", ())

    def raw(self) -> Expectation:
        return self._arrays("raw", (slice(None), slice(None), slice(0, len(self.tokens))))

    def _arrays(self, name: str, used: tuple[slice, ...]) -> Expectation:
        batch, heads, dim = self.sizes
        unknown = np.zeros((batch, heads, dim), np.float32)
        parts = [[unknown if token is None else token[which] for token in self.tokens] for which in (0, 1)]
        stacked = [np.stack(part, axis=2) if part else np.zeros((batch, heads, 0, dim), np.float32) for part in parts]
        unsure = np.broadcast_to(np.array([token is None for token in self.tokens], bool)[None, None, :, None], stacked[0].shape)
        shape = (batch, heads, self.room if self.reports_capacity else None, dim) if used else None

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            new = index[2] - self.before
            if new < 0 or self.last_change not in ("append", "append_fused", "grown"):
                return self.clause_of(name)
            if self._is_of_a_copy(index, stacked, got):
                return "EDIT-08"
            if self._is_misrounded(index, new, got):
                return "CONTIG-12"
            return "CONTIG-09" if self.last_change == "append_fused" else "LAW-04"

        return ExpectedArrays(
            self.clause_of(name), names=("keys", "values"), parts=(exact_reads(stacked[0]), exact_reads(stacked[1])),
            used_slices=used, shape=shape,
            undetermined=unsure if unsure.any() else None, codes_of=self.dtype if name == "raw" else "",
            clause_at=clause_at,
        )  # fmt: skip

    def _is_misrounded(self, index: tuple[int, ...], new: int, got: NDArray) -> bool:
        """Returns whether the number is the right one, wrongly rounded to a narrow dtype."""
        exact = [float(part[index[0], index[1], new, index[3]]) for part in self.appended]
        return self.dtype != "float32" and any(abs(float(got[index]) - each) <= 2.0**-6 * abs(each) for each in exact)

    def _is_of_a_copy(self, index: tuple[int, ...], stacked: Sequence[NDArray], got: NDArray) -> bool:
        """Returns whether the number is that of another copy of the same row since the last reorder."""
        row, *place = index
        copies = [each for each, origin in enumerate(self.origins) if origin == self.origins[row] and each != row]
        return any(part[(copy, *place)] == got[index] for copy in copies for part in stacked)

    def advance(self, count: int) -> Expectation:
        if wrong := range_errors(count, None, "PositionOutOfRange"):
            return self.expect_error(wrong)
        if len(self.tokens) + count > self.room:
            return self.expect_error([("CapacityExceeded", "CONTIG-10")])
        return Expectation("CONTIG-10", self.on_success("advance", lambda ok: self.tokens.extend([None] * count)))

    def truncate(self, length: Any) -> Expectation:
        if wrong := range_errors(length, len(self.tokens) + 1, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)
        clause = "EDIT-02" if length == len(self.tokens) else "EDIT-01"
        return Expectation(clause, self.on_success("truncate", lambda ok: self.tokens.__delitem__(slice(length, None))))

    def reorder(self, rows: Sequence[Any]) -> Expectation:
        batch, heads, dim = self.sizes
        wrong = [each for row in rows for each in range_errors(row, batch, "RowOutOfRange", "EDIT-09")]
        if wrong:
            return self.expect_error(wrong)
        if not rows:
            raise ValueError("reorder([]) has no single expected result (EDIT-09)")

        def change(ok: Any) -> None:
            self.sizes, self.origins = (len(rows), heads, dim), list(rows)
            self.tokens = [token and (token[0][self.origins], token[1][self.origins]) for token in self.tokens]

        return Expectation("EDIT-07", self.on_success("reorder", change))

    def reset(self) -> Expectation:
        return Expectation("CONTIG-11", self.on_success("reset", lambda ok: self.tokens.clear()))
