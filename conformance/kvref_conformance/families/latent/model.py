"""The reference model of the latent cache: a list of latents and rope parts."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import LARGE, U
from kvref_conformance.oracle.expectations import (  # fmt: skip
    AcceptedOrError,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    Wrong,
    finite,
    float32,
    not_finite,
    not_in_range,
    refuse,
    tokens_of,
    wrong_arrays,
    wrong_dtype,
)
from kvref_conformance.oracle.formats import PACKED, PLAIN
from kvref_conformance.oracle.formats.mla import attention, records_of, row_as, row_bytes
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.reference_model import Look
from kvref_conformance.oracle.saved_state import BLAMED, WholeCacheModel


class Latent(WholeCacheModel):
    family = "latent"
    no_room = ("CapacityExceeded",)
    held = ("tokens", "undefined")
    blamed: ClassVar = {
        **BLAMED,
        ("clear", "length"): "MLA-05", ("clear", "read"): "LAW-05", ("truncate", "length"): "EDIT-01",
        ("truncate", "read"): "EDIT-01", "length": "MLA-05",
    }  # fmt: skip

    def __init__(self, *, rank: int, rope_dim: int, max_tokens: int, dtype: str) -> None:
        super().__init__()
        self.rank, self.rope_dim, self.room, self.dtype = rank, rope_dim, max_tokens, dtype
        self.scaled = dtype not in (*PLAIN, PACKED)
        self.tokens: list[tuple[NDArray, NDArray]] = []  # latents and rope parts as they were appended
        self.undefined = False  # numbers were accepted that are not finite: no clause defines their bytes

    def looks(self) -> list[Look]:
        return [("length", {}), ("num_bytes", {}), ("read", {}), ("records", {})]

    def length(self) -> Expectation:
        return ExactValue(self.blame("length"), value=len(self.tokens))

    def num_bytes(self) -> Expectation:
        return ExactValue(
            "MLA-06" if self.scaled else "MLA-03", value=len(self.tokens) * row_bytes(self.rank, self.rope_dim, self.dtype)
        )

    def append(self, latent: Any, rope: Any) -> Expectation:
        arrays = (latent, (None, self.rank)), (rope, (None, self.rope_dim))
        total = len(self.tokens) + tokens_of(*arrays)
        wrong = wrong_arrays(*arrays) + ([("CapacityExceeded", "MLA-05")] if total > self.room else [])
        if wrong:
            return self.refuse(wrong + self._unstorable(arrays))
        rows = list(zip(float32(latent), float32(rope), strict=True))

        def change(ok: Any) -> None:
            self.tokens += rows

        def accept(ok: Any) -> None:
            self.undefined = True
            change(ok)

        if self._unstorable(arrays):
            return AcceptedOrError("MLA-05", self.did("append", accept), refused=lambda: self.did("refused")(None))
        return Expectation("MLA-05", self.did("append", change))

    def _unstorable(self, arrays: Any) -> Wrong:
        """Returns NonFinite if numbers are not finite, or not finite when they are read back from a record."""
        arrays = [float32(array) for array, _ in arrays]
        if not finite(*arrays) or self.dtype in PLAIN or [each.ndim for each in arrays] != [2, 2]:
            return not_finite(*arrays)
        latent, rope = arrays
        widths = latent.shape[1], rope.shape[1]
        if widths != (self.rank, self.rope_dim) or len(latent) != len(rope):
            return []
        with np.errstate(over="ignore"):
            return not_finite(row_as(latent, rope, self.dtype).values[:, : self.rank + self.rope_dim * self.scaled])

    def _rows(self) -> tuple[NDArray, NDArray]:
        latent, rope = (np.array([token[which] for token in self.tokens], np.float32) for which in (0, 1))
        return latent.reshape(-1, self.rank), rope.reshape(-1, self.rope_dim)

    def read(self) -> Expectation:
        if self.undefined and self.dtype not in PLAIN:
            return UnjudgedReply("LAW-14")
        clause = "MLA-06" if self.scaled and self.last != "truncate" else self.blame("read")
        return ExpectedArrays(clause, parts=(row_as(*self._rows(), self.dtype),))

    def records(self) -> Expectation:
        if self.undefined:
            return UnjudgedReply("LAW-14")
        return ExpectedArrays("MLA-06" if self.scaled else "MLA-04", parts=(records_of(*self._rows(), self.dtype),))

    def truncate(self, length: Any) -> Expectation:
        if wrong := not_in_range(length, len(self.tokens) + 1, "PositionOutOfRange", "EDIT-02"):
            return self.refuse(wrong)

        def change(ok: Any) -> None:
            self.tokens = self.tokens[:length]

        return Expectation("EDIT-02" if length == len(self.tokens) else "EDIT-01", self.did("truncate", change))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            self.tokens, self.undefined = [], False

        return Expectation("MLA-05", self.did("clear", change))

    def shape(self) -> Any:
        return self.rank, self.rope_dim, self.dtype

    def is_empty(self) -> bool:
        return not self.tokens

    def lacks(self, content: dict[str, Any]) -> Wrong:
        return [("CapacityExceeded", "MOVE-02")] if len(content["tokens"]) > self.room else []

    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: float, causal: bool) -> Expectation:
        arrays = [float32(each) for each in (query, up_keys, up_values)]
        wrong = [each for array in (query, up_keys, up_values) for each in wrong_dtype(array)]
        if wrong := self._wrong_shapes(*map(np.shape, arrays)) + wrong:
            return refuse(wrong + not_finite(*arrays), lambda: None)
        if self.undefined:
            return UnjudgedReply("MLA-02")
        rows = row_as(*self._rows(), self.dtype)
        query, up_keys, up_values = arrays
        if rows.slack.any() or not finite(*arrays, rows.values) or _overflows(query, up_keys, up_values, rows.values, scale):
            return UnjudgedReply("MLA-02")  # the rows are not known to the bit, or no bound holds
        out, bound = attention(query, rows.values, up_keys, up_values, scale=scale, causal=causal)
        return ExpectedArrays(
            "MLA-02", parts=(ExpectedReads(out.astype(np.float32), bound + U * np.abs(out)),), always_slack=True
        )

    def _wrong_shapes(self, query: tuple[int, ...], up_keys: tuple[int, ...], up_values: tuple[int, ...]) -> Wrong:
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
    return bool(max(sums) > LARGE)
