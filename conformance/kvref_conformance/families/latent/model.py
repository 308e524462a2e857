"""The reference model of the latent cache: a list of latents and rope parts."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import MAX_MAGNITUDE, U, other_convention
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
    dtype_errors,
    expect_error,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats import PACKED_FORMAT, PLAIN_FORMATS
from kvref_conformance.oracle.formats.mla import attention, expected_records, expected_row, row_bytes
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.saved_state import CLAUSE_BY_OBSERVATION, WholeCacheModel


class Latent(WholeCacheModel):
    family = "latent"
    room_errors = ("CapacityExceeded",)
    content_attributes = ("tokens", "undefined")
    clause_by_observation: ClassVar = {
        **CLAUSE_BY_OBSERVATION,
        ("clear", "length"): "MLA-05", ("clear", "read"): "LAW-05", ("truncate", "length"): "EDIT-01",
        ("truncate", "read"): "EDIT-01", "length": "MLA-05",
    }  # fmt: skip

    def __init__(self, *, rank: int, rope_dim: int, max_tokens: int, dtype: str) -> None:
        super().__init__()
        self.rank, self.rope_dim, self.room, self.dtype = rank, rope_dim, max_tokens, dtype
        self.scaled = dtype not in (*PLAIN_FORMATS, PACKED_FORMAT)
        self.tokens: list[tuple[NDArray, NDArray]] = []  # latents and rope parts as they were appended
        self.undefined = False  # numbers were accepted that are not finite: no clause defines their bytes

    def observations(self) -> list[ReadCall]:
        return [("length", {}), ("num_bytes", {}), ("read", {}), ("records", {})]

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=len(self.tokens))

    def num_bytes(self) -> Expectation:
        return ExactValue(
            "MLA-06" if self.scaled else "MLA-03", value=len(self.tokens) * row_bytes(self.rank, self.rope_dim, self.dtype)
        )

    def append(self, latent: Any, rope: Any) -> Expectation:
        arrays = (latent, (None, self.rank)), (rope, (None, self.rope_dim))
        total = len(self.tokens) + count_tokens(*arrays)
        wrong = array_errors(*arrays) + ([("CapacityExceeded", "MLA-05")] if total > self.room else [])
        if wrong:
            return self.expect_error(wrong + self._unstorable(arrays))
        rows = list(zip(to_float32(latent), to_float32(rope), strict=True))

        def change(ok: Any) -> None:
            self.tokens += rows

        def accept(ok: Any) -> None:
            self.undefined = True
            change(ok)

        if self._unstorable(arrays):
            return AcceptedOrError("MLA-05", self.on_success("append", accept), on_error=lambda: self.note_unchanged("refused"))
        return Expectation("MLA-05", self.on_success("append", change))

    def _unstorable(self, arrays: Any) -> Errors:
        """Returns NonFinite if numbers are not finite, or not finite when they are read back from a record."""
        arrays = [to_float32(array) for array, _ in arrays]
        if not all_finite(*arrays) or self.dtype in PLAIN_FORMATS or [each.ndim for each in arrays] != [2, 2]:
            return finite_errors(*arrays)
        latent, rope = arrays
        widths = latent.shape[1], rope.shape[1]
        if widths != (self.rank, self.rope_dim) or len(latent) != len(rope):
            return []
        with np.errstate(over="ignore"):
            return finite_errors(expected_row(latent, rope, self.dtype).values[:, : self.rank + self.rope_dim * self.scaled])

    def _rows(self) -> tuple[NDArray, NDArray]:
        latent, rope = (np.array([token[which] for token in self.tokens], np.float32) for which in (0, 1))
        return latent.reshape(-1, self.rank), rope.reshape(-1, self.rope_dim)

    def read(self) -> Expectation:
        if self.undefined and self.dtype not in PLAIN_FORMATS:
            return UnjudgedReply("LAW-14")
        clause = "MLA-06" if self.scaled and self.last_change != "truncate" else self.clause_of("read")
        return ExpectedArrays(clause, parts=(expected_row(*self._rows(), self.dtype),))

    def records(self) -> Expectation:
        if self.undefined:
            return UnjudgedReply("LAW-14")
        return ExpectedArrays("MLA-06" if self.scaled else "MLA-04", parts=(expected_records(*self._rows(), self.dtype),))

    def truncate(self, length: Any) -> Expectation:
        if wrong := range_errors(length, len(self.tokens) + 1, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.tokens = self.tokens[:length]

        return Expectation("EDIT-02" if length == len(self.tokens) else "EDIT-01", self.on_success("truncate", change))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            self.tokens, self.undefined = [], False

        return Expectation("MLA-05", self.on_success("clear", change))

    def shape(self) -> Any:
        return self.rank, self.rope_dim, self.dtype

    def is_empty(self) -> bool:
        return not self.tokens

    def missing_room(self, content: dict[str, Any]) -> Errors:
        return [("CapacityExceeded", "MOVE-02")] if len(content["tokens"]) > self.room else []

    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: float, causal: bool) -> Expectation:
        arrays = [to_float32(each) for each in (query, up_keys, up_values)]
        wrong = [each for array in (query, up_keys, up_values) for each in dtype_errors(array)]
        if wrong := self._wrong_shapes(*map(np.shape, arrays)) + wrong:
            return expect_error(wrong + finite_errors(*arrays), lambda: None)
        if self.undefined:
            return UnjudgedReply("MLA-02")
        rows = expected_row(*self._rows(), self.dtype)
        query, up_keys, up_values = arrays
        if rows.slack.any() or not all_finite(*arrays, rows.values) or _overflows(query, up_keys, up_values, rows.values, scale):
            return UnjudgedReply("MLA-02")  # the rows are not known to the bit, or no bound holds
        out, bound = attention(query, rows.values, up_keys, up_values, scale=scale, causal=causal)

        def explain(got: NDArray) -> str:
            latent, rope = rows.values[:, : self.rank], rows.values[:, None, self.rank :]
            keys = np.einsum("hdr,nr->nhd", up_keys, latent)
            keys = np.concatenate([keys, np.broadcast_to(rope, (*keys.shape[:2], self.rope_dim))], axis=2)
            values = np.einsum("hvr,nr->nhv", up_values, latent)
            return other_convention(query, keys, values, got, scale=scale, causal=causal)

        return ExpectedArrays(
            "MLA-02",
            parts=(ExpectedReads(out.astype(np.float32), bound + U * np.abs(out)),),
            always_slack=True,
            explain=explain,
        )

    def _wrong_shapes(self, query: tuple[int, ...], up_keys: tuple[int, ...], up_values: tuple[int, ...]) -> Errors:
        fits = len(query) == len(up_keys) == len(up_values) == 3 and up_keys[2] == up_values[2] == self.rank
        fits = fits and query[1:] == (up_keys[0], up_keys[1] + self.rope_dim) and up_values[0] == up_keys[0]
        return [] if fits and 0 not in (*up_keys, *up_values) else [("ShapeMismatch", "LAW-10")]


def _overflows(query: NDArray, up_keys: NDArray, up_values: NDArray, rows: NDArray, scale: float) -> bool:
    """Returns whether an intermediate result can exceed the range of float32, in any order of the products."""
    q, a, b, c = (float(np.abs(each).max(initial=0)) for each in (query, up_keys, up_values, rows))
    nope, rank = up_keys.shape[1:]
    sums = (
        rank * a * c,
        nope * q * a,
        len(rows) * rank * b * c,
        max(1.0, abs(scale)) * (nope * rank * q * a * c + query.shape[2] * q * c),
    )
    return bool(max(sums) > MAX_MAGNITUDE)
