"""The reference model of the family `ragged`: one list of tokens per row."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
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
from kvref_conformance.oracle.padded_batches import count_errors, expect_attend_by_row, query_errors
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

Row = list[tuple[NDArray, NDArray]]  # the key and the value of each token, [num_kv_heads, head_dim] each
SEEN = ("batch_size", "length", "read")


class Ragged(ReferenceModel):
    family = "ragged"
    clause_by_observation: ClassVar = {
        **{(change, seen): clause for change, clause in
           (("filter", "RAGGED-06"), ("extend", "RAGGED-07"), ("trim", "RAGGED-08")) for seen in SEEN},
        "batch_size": "RAGGED-06", "length": "RAGGED-02", "read": "RAGGED-01",
    }  # fmt: skip

    def __init__(self, *, batch_size: int, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        super().__init__()
        self.heads, self.dim, self.most = num_kv_heads, head_dim, max_tokens
        self.rows: list[Row] = [[] for _ in range(batch_size)]
        self.idle: set[int] = set()  # the rows that got no tokens in the last append
        self.padding_is_finite = True  # in all appends

    def observations(self) -> list[ReadCall]:
        rows = range(len(self.rows))
        return [("batch_size", {}), *((name, {"row": row}) for name in ("length", "read") for row in rows)]

    def batch_size(self) -> Expectation:
        return ExactValue(self.clause_of("batch_size"), value=len(self.rows))

    def length(self, row: Any) -> Expectation:
        if wrong := range_errors(row, len(self.rows), "RowOutOfRange", "RAGGED-01"):
            return self.expect_error(wrong)
        return ExactValue(self._clause("length", row), value=len(self.rows[row]))

    def read(self, row: Any) -> Expectation:
        if wrong := range_errors(row, len(self.rows), "RowOutOfRange", "RAGGED-01"):
            return self.expect_error(wrong)
        parts = tuple(exact_reads(part.swapaxes(0, 1)) for part in self.tokens_of(row))
        return ExpectedArrays(self._clause("read", row), names=("keys", "values"), parts=parts)

    def tokens_of(self, row: int) -> list[NDArray]:
        """Returns the keys and values of a row, [length, num_kv_heads, head_dim] each."""
        return [
            np.array([token[part] for token in self.rows[row]], np.float32).reshape(-1, self.heads, self.dim) for part in (0, 1)
        ]

    def _clause(self, seen: str, row: int) -> str:
        return "RAGGED-05" if self.last_change == "append" and row in self.idle else self.clause_of(seen)

    def append(self, keys: Any, values: Any, counts: Any = None, left: Any = False) -> Expectation:
        return self._add("append", len(self.rows), keys, values, counts, left)

    def extend(self, keys: Any, values: Any, counts: Any = None, left: Any = False) -> Expectation:
        return self._add("extend", np.shape(keys)[0] if np.ndim(keys) else 0, keys, values, counts, left)

    def _add(self, name: str, number: int, keys: Any, values: Any, counts: Any, left: bool) -> Expectation:
        shape = number, self.heads, None, self.dim
        wrong = array_errors((keys, shape), (values, shape))
        columns = count_tokens((keys, shape), (values, shape))
        counted = [columns] * number if counts is None else counts
        unclear = any(kind == "ShapeMismatch" for kind, _ in wrong)  # then no count is known to be wrong
        wrong += count_errors("RAGGED-09", counted, [None if unclear else columns] * number)
        before = self.rows if name == "append" else [[] for _ in counted]
        valid = [count for count in counted if not range_errors(count, None, "")]
        if len(valid) == len(counted) == number and any(
            len(row) + count > self.most for row, count in zip(before, valid, strict=True)
        ):
            wrong.append(("CapacityExceeded", "RAGGED-10"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))
        spans = [range(columns - count, columns) if left else range(count) for count in counted]
        arrays = to_float32(keys), to_float32(values)
        new = [[(arrays[0][row, :, column], arrays[1][row, :, column]) for column in span] for row, span in enumerate(spans)]

        def change(ok: Any) -> None:
            self.rows = [old + more for old, more in zip(before, new, strict=True)] if name == "append" else self.rows + new
            self.idle = {row for row, more in enumerate(new) if not more}
            self.padding_is_finite &= all_finite(*arrays)

        then = self.on_success(name, change)
        finite = all_finite(*(part for row in new for token in row for part in token))
        clause = "RAGGED-10" if all_finite(*arrays) else "RAGGED-03"
        return Expectation(clause, then) if finite else AcceptedOrError(clause, then)

    def filter(self, rows: Sequence[Any]) -> Expectation:
        wrong = [each for row in rows for each in range_errors(row, len(self.rows), "RowOutOfRange", "RAGGED-06")]
        if wrong or not rows:
            return self.expect_error(wrong or [("RowOutOfRange", "RAGGED-06")])

        def change(ok: Any) -> None:
            self.rows = [list(self.rows[row]) for row in rows]

        return Expectation("RAGGED-06", self.on_success("filter", change))

    def trim(self, counts: Sequence[Any]) -> Expectation:
        wrong = count_errors("RAGGED-09", counts, [None] * len(self.rows))
        if not wrong and any(count > len(row) for count, row in zip(counts, self.rows, strict=True)):
            wrong = [("PositionOutOfRange", "RAGGED-08")]
        if wrong:
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

        return Expectation("RAGGED-08", self.on_success("trim", change))

    def attend(self, query: Any, scale: Any = None, causal: Any = False) -> Expectation:
        if wrong := query_errors(query, len(self.rows), self.heads, self.dim):
            return self.expect_error(wrong + finite_errors(query))
        count = np.shape(query)[2]

        def views(length: int) -> list[NDArray]:
            return [np.arange(max(0, length - count + at + 1) if causal else length) for at in range(count)]

        rows = ((self.tokens_of(row), views(len(tokens))) for row, tokens in enumerate(self.rows))
        return expect_attend_by_row("RAGGED-04" if self.padding_is_finite else "RAGGED-03", query, scale, rows)
