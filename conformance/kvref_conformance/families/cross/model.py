"""The reference model of the family `cross`: per row, a list of tokens, and a list of entries or None."""

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
from kvref_conformance.oracle.padded_batches import count_errors, expect_attend_by_row, query_errors
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

Entries = list[tuple[NDArray, NDArray]]  # the key and the value of each, [num_kv_heads, head_dim] each
OF_SOURCE, OF_TOKENS = ("source_length", "read_source"), ("length", "read")


class Cross(ReferenceModel):
    family = "cross"
    clause_by_observation: ClassVar = {
        **{(change, seen): clause for change, clause in (("filter", "CROSS-06"), ("clear", "CROSS-07"))
           for seen in ("batch_size", *OF_SOURCE, *OF_TOKENS)},
        **{(change, seen): "CROSS-04" for change in ("append", "trim") for seen in OF_SOURCE},
        **{("write_source", seen): "CROSS-04" for seen in OF_TOKENS},
        "batch_size": "CROSS-06", "source_length": "CROSS-01", "read_source": "CROSS-01",
        "length": "CROSS-08", "read": "CROSS-08",
    }  # fmt: skip

    def __init__(self, *, batch_size: int, num_kv_heads: int, head_dim: int, max_tokens: int, max_source: int) -> None:
        super().__init__()
        self.heads, self.dim, self.most, self.most_source = num_kv_heads, head_dim, max_tokens, max_source
        self.rows: list[Entries] = [[] for _ in range(batch_size)]
        self.sources: list[Entries | None] = [None] * batch_size
        self.former: list[int] = [0] * batch_size  # the entries of the longest source that a row had before it was cleared
        self.padding_is_finite = True  # of all sources

    def observations(self) -> list[ReadCall]:
        rows = range(len(self.rows))
        return [("batch_size", {}), *((name, {"row": row}) for name in (*OF_TOKENS, *OF_SOURCE) for row in rows)]

    def batch_size(self) -> Expectation:
        return ExactValue(self.clause_of("batch_size"), value=len(self.rows))

    def length(self, row: Any) -> Expectation:
        if wrong := range_errors(row, len(self.rows), "RowOutOfRange", "CROSS-08"):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("length"), value=len(self.rows[row]))

    def read(self, row: Any) -> Expectation:
        if wrong := range_errors(row, len(self.rows), "RowOutOfRange", "CROSS-08"):
            return self.expect_error(wrong)
        return self._expect_pair("read", self.rows[row])

    def source_length(self, row: Any) -> Expectation:
        if wrong := self._source_errors(row):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("source_length"), value=len(self.sources[row] or []))

    def read_source(self, row: Any) -> Expectation:
        if wrong := self._source_errors(row):
            return self.expect_error(wrong)
        return self._expect_pair("read_source", self.sources[row] or [])

    def _source_errors(self, row: Any) -> Errors:
        wrong = range_errors(row, len(self.rows), "RowOutOfRange", "CROSS-01")
        if not wrong and self.sources[row] is None:
            after = {"clear": "CROSS-07", "filter": "CROSS-06"}.get(self.last_change, "CROSS-02")
            wrong = [("SourceNotWritten", after)]
        return wrong

    def _expect_pair(self, name: str, entries: Entries) -> Expectation:
        parts = tuple(exact_reads(part.swapaxes(0, 1)) for part in self._arrays(entries))
        return ExpectedArrays(self.clause_of(name), names=("keys", "values"), parts=parts)

    def _arrays(self, entries: Entries) -> list[NDArray]:
        """Returns keys and values [n, num_kv_heads, head_dim] each."""
        return [np.array([entry[part] for entry in entries], np.float32).reshape(-1, self.heads, self.dim) for part in (0, 1)]

    def write_source(self, rows: Sequence[Any], keys: Any, values: Any, counts: Any = None) -> Expectation:
        wrong = [each for row in rows for each in range_errors(row, len(self.rows), "RowOutOfRange", "CROSS-01")][:1]
        found, counted = self._new_entries(len(rows), keys, values, counts)
        wrong += found
        if any(count > self.most_source for count in counted):
            wrong.append(("CapacityExceeded", "CROSS-09"))
        known = [row for row in rows if not range_errors(row, len(self.rows), "")]
        if len(set(known)) < len(known) or any(self.sources[row] is not None for row in known):
            wrong.append(("SourceAlreadyWritten", "CROSS-03"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))
        new = self._tokens_of(keys, values, counted)

        def change(ok: Any) -> None:
            for row, entries in zip(rows, new, strict=True):
                self.sources[row] = entries
            self.padding_is_finite &= all_finite(to_float32(keys), to_float32(values))

        return self._accepted("write_source", "CROSS-01", "CROSS-05", change, keys, values, new)

    def append(self, keys: Any, values: Any, counts: Any = None) -> Expectation:
        wrong, counted = self._new_entries(len(self.rows), keys, values, counts)
        if any(len(row) + count > self.most for row, count in zip(self.rows, counted, strict=False)):
            wrong.append(("CapacityExceeded", "CROSS-09"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))
        new = self._tokens_of(keys, values, counted)

        def change(ok: Any) -> None:
            self.rows = [old + more for old, more in zip(self.rows, new, strict=True)]

        return self._accepted("append", "CROSS-08", "CROSS-08", change, keys, values, new)

    def _new_entries(self, number: int, keys: Any, values: Any, counts: Any) -> tuple[Errors, list[int]]:
        """Returns the errors of arrays with `number` rows and of their counts, and the counts that are not invalid."""
        shape = number, self.heads, None, self.dim
        wrong = array_errors((keys, shape), (values, shape))
        columns = count_tokens((keys, shape), (values, shape))
        counted = [columns] * number if counts is None else list(counts)
        unclear = any(kind == "ShapeMismatch" for kind, _ in wrong)  # then no count is known to be too large
        wrong = wrong + count_errors("CROSS-09", counted, [None if unclear else columns] * number)
        fits = len(counted) == number
        return wrong, [0 if range_errors(count, None, "") or not fits else int(count) for count in counted]

    def _tokens_of(self, keys: Any, values: Any, counts: list[int]) -> list[Entries]:
        arrays = to_float32(keys), to_float32(values)
        return [[(arrays[0][row, :, at], arrays[1][row, :, at]) for at in range(count)] for row, count in enumerate(counts)]

    def _accepted(
        self, name: str, clause: str, of_padding: str, change: Any, keys: Any, values: Any, new: list[Entries]
    ) -> Expectation:
        """Returns the expectation of a call that is valid. Entries that are not finite may be refused; padding must not."""
        then = self.on_success(name, change)
        clause = clause if all_finite(to_float32(keys), to_float32(values)) else of_padding
        finite = all_finite(*(part for entries in new for entry in entries for part in entry))
        return Expectation(clause, then) if finite else AcceptedOrError(clause, then)

    def trim(self, counts: Sequence[Any]) -> Expectation:
        wrong = count_errors("CROSS-09", counts, [None] * len(self.rows))
        if not wrong and any(count > len(row) for count, row in zip(counts, self.rows, strict=True)):
            wrong = [("PositionOutOfRange", "CROSS-08")]
        if wrong:
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

        return Expectation("CROSS-08", self.on_success("trim", change))

    def filter(self, rows: Sequence[Any]) -> Expectation:
        wrong = [each for row in rows for each in range_errors(row, len(self.rows), "RowOutOfRange", "CROSS-06")]
        if wrong or not rows:
            return self.expect_error(wrong or [("RowOutOfRange", "CROSS-06")])

        def change(ok: Any) -> None:
            self.rows, self.sources = [list(self.rows[row]) for row in rows], [self.sources[row] for row in rows]
            self.former = [self.former[row] for row in rows]

        return Expectation("CROSS-06", self.on_success("filter", change))

    def clear(self, row: Any) -> Expectation:
        if wrong := range_errors(row, len(self.rows), "RowOutOfRange", "CROSS-07"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.former[row] = max(self.former[row], len(self.sources[row] or []))
            self.rows[row], self.sources[row] = [], None

        return Expectation("CROSS-07", self.on_success("clear", change))

    def attend_source(self, query: Any, scale: Any = None) -> Expectation:
        wrong = query_errors(query, len(self.sources), self.heads, self.dim)
        if None in self.sources:
            wrong.append(("SourceNotWritten", "CROSS-02"))
        if wrong:
            return self.expect_error(wrong + finite_errors(query))
        count, sources = np.shape(query)[2], [source or [] for source in self.sources]
        rows = ((self._arrays(source), [np.arange(len(source))] * count) for source in sources)
        return expect_attend_by_row("CROSS-05", query, scale, rows)
