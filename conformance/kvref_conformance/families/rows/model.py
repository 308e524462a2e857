"""The reference model of quantizing rows and reading them back."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import format_value
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import Level, NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    LeadingRows,
    all_finite,
    array_errors,
    exact_reads,
    expect_error,
    finite_errors,
    to_float32,
)
from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    MX_FORMATS,
    NVFP4_FORMATS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
    ggml,
    group_of,
    hadamard_rotation,
    inner_of,
    mx,
    per_group,
    per_row,
    static_scale,
)
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.reference_model import FunctionModel


class Rows(FunctionModel):
    family = "rows"

    def __init__(self, given_scale: float | None = None) -> None:
        super().__init__()
        self.scale = 1.0 if given_scale is None else given_scale

    def quantize(self, rows: NDArray, format: str) -> Expectation:
        if np.ndim(rows) != 2:
            raise ValueError("rows: expected two dimensions")
        if wrong := array_errors((rows, np.shape(rows))):
            return expect_error(wrong + finite_errors(rows), lambda: None)
        x = to_float32(rows)
        if not all_finite(x):
            return AcceptedOrError("LAW-14")
        if format in STATIC_FORMATS:
            codes, other = static_scale.store(x, format, self.scale).codes, static_scale.admissible_too(x, format, self.scale)
            return LeadingRows("FMT-STATIC-01", names=("codes",), parts=(ExpectedReads(codes, other.astype(np.float64)),))
        if format in ROTATED_FORMATS and not hadamard_rotation.may_overflow(x).any():
            inner = _quantized(hadamard_rotation.rotate_rows(x), inner_of(format))
            return inner if isinstance(inner, ExpectedError) else ExpectedRotatedCodes("FMT-ROT-02", inner=inner)
        return _quantized(x, format)

    def dequantize(
        self,
        codes: NDArray,
        scale: NDArray | None,
        zero: NDArray | None,
        width: int,
        format: str,
    ) -> Expectation:
        if format in STATIC_FORMATS:
            values = static_scale.decode_values(np.asarray(codes), format, self.scale)
            return ExpectedArrays("FMT-STATIC-03", parts=(exact_reads(values),))
        if format in ROTATED_FORMATS:
            inner = self.dequantize(codes, scale, zero, width, inner_of(format))
            assert isinstance(inner, ExpectedArrays)
            (read,) = inner.parts
            return ExpectedArrays(
                "FMT-ROT-03",
                parts=(
                    ExpectedReads(hadamard_rotation.rotate_rows(read.values), hadamard_rotation.summation_error(read.values)),
                ),
            )
        if format in GGML_FORMATS:
            return ExpectedArrays("FMT-GGML-01", parts=(exact_reads(ggml.read(np.asarray(codes, np.uint8), format).values),))
        if scale is None:
            raise ValueError("dequantize: codes without scales cannot be predicted")
        return ExpectedArrays(_clause(format, "value"), parts=(exact_reads(per_row.said(codes, scale, zero, width, format)),))


@dataclass(frozen=True)
class ExpectedCodesInGroups(Expectation):
    """The expected packed codes, scales and zeros: those of the definition, or any admissible ones at level tolerant."""

    rows: NDArray = field(default_factory=lambda: np.zeros((0, 0)))
    format: str = ""

    def compare(self, ok: Any, op: str, level: Level) -> None:
        (codes, scale, zero), width, exact = ok, self.rows.shape[1], level == "exact"
        if scale is None and self.format not in GGML_FORMATS:
            return  # its own byte layout: only the values read back are judged
        unpacked = per_row.a_byte_each(codes, width, self.format)
        shape = self.rows.shape if unpacked else per_row.packed(per_row.store(self.rows, self.format), self.format).shape
        if np.shape(codes) != shape:
            raise ClauseViolation(f"codes of {op}", f"shape {list(shape)}", f"shape {list(np.shape(codes))}", self.clause)
        got = per_row.as_read(codes, scale, zero, width, self.format, self.rows)
        want, of_groups = per_row.store(self.rows, self.format, got.codes), self.format in GROUP_FORMATS
        for name, part, wanted in (("scale", got.scale, want.scale), ("zero", got.zero, want.zero)):
            least = exact or (name == "zero" and of_groups)  # a zero is a number of the row, rounded
            ulp = 0 if least else per_row.ulp_of_scales(wanted, self.format)
            if not (np.abs(part.astype(np.float64) - wanted) <= ulp).all():
                raise ClauseViolation(
                    f"{name} of {op}", format_value(wanted), format_value(part), "FMT-GROUP-01" if of_groups else self.clause
                )
        scales = got if of_groups and not exact else None
        want = want if scales is None else per_row.codes_for_scales(self.rows, scales, self.format)
        if exact:
            wrong = [(int(n), int(i)) for n, i in np.argwhere(got.codes != want.codes)]
        else:
            wrong = per_row.inadmissible(self.rows, got.codes, self.format, scales)
        if wrong:
            n, i = wrong[0]
            raise ClauseViolation(f"code {i} of row {n} of {op}", str(want.codes[n, i]), str(got.codes[n, i]), self.clause)

    def to_json(self) -> dict[str, Any]:
        if self.format in GGML_FORMATS and ggml.any_code(self.rows, self.format).any():
            return {"any": True}
        want, microscaled = per_row.store(self.rows, self.format), self.format in (*MX_FORMATS, *NVFP4_FORMATS)
        scale = mx.scale_codes(self.rows, self.format) if microscaled else None if self.format in GGML_FORMATS else want.scale
        zero = want.zero if self.format in GROUP_FORMATS and per_group.is_affine(self.format) else None
        of_scale = int(self.format in NVFP4_FORMATS) if microscaled else per_row.ulp_of_scales(want.scale, self.format)
        slack = [255, of_scale, 0][: 1 + (scale is not None) + (zero is not None)]  # 255: several codes share a byte
        ok = [per_row.packed(want, self.format), scale, zero]
        return {"ok": ok, "tolerant": slack if len(slack) > 1 else slack[0]}


@dataclass(frozen=True)
class ExpectedRotatedCodes(Expectation):
    """The expected storage of rotated rows. Sums depend on their order, so that level tolerant judges values only."""

    inner: Expectation = field(default_factory=lambda: Expectation(""))

    def compare(self, ok: Any, op: str, level: Level) -> None:
        if level == "exact":
            try:
                self.inner.compare(ok, op, level)
            except ClauseViolation as violation:
                violation.clause = self.clause
                raise

    def to_json(self) -> dict[str, Any]:
        said = self.inner.to_json()
        if "ok" not in said:
            return said
        within = zip(said["ok"], (255.0, 3e38, 3e38), strict=True)
        slack = [None if part is None else np.full(part.shape, most, np.float32) for part, most in within]
        return said | {"tolerant": slack if slack[1] is not None else slack[0]}


def _clause(format: str, of: str) -> str:
    """Returns the clause about the codes, or the values, of a format."""
    clauses = {
        "int8": ("FMT-INT8-02", "FMT-INT8-03"), **dict.fromkeys(AFFINE_FORMATS, ("FMT-AFF-02", "FMT-AFF-04")),
        **dict.fromkeys(GROUP_FORMATS, ("FMT-GROUP-02", "FMT-GROUP-04")), **dict.fromkeys(MX_FORMATS, ("FMT-MX-03", "FMT-MX-01")),
        **dict.fromkeys(NVFP4_FORMATS, ("FMT-MX-06", "FMT-MX-01")),
        **dict.fromkeys(("q4_0", "q5_0"), ("FMT-GGML-03", "FMT-GGML-01")),
        **dict.fromkeys(("q4_1", "q5_1"), ("FMT-GGML-04", "FMT-GGML-01")),
        "q8_0": ("FMT-GGML-02", "FMT-GGML-01"), "iq4_nl": ("FMT-GGML-05", "FMT-GGML-01"),
    }  # fmt: skip
    return clauses.get(format, ("FMT-FP8-08", "FMT-FP8-08"))[of == "value"]


def _quantized(x: NDArray, format: str) -> Expectation:
    if x.shape[1] % group_of(format):
        return ExpectedError("FMT-GROUP-03", kinds=("ConfigError",))
    want = per_row.store(x, format)
    if not np.isfinite(want.scale).all() and format in AFFINE_FORMATS:
        return ExpectedError("FMT-AFF-01", kinds=("NonFinite",))
    if not all_finite(want.values):  # at level tolerant a scale one ulp smaller can make them finite
        return AcceptedOrError("FMT-LEVEL-05")
    if format in FORMATS_IN_GROUPS:
        return ExpectedCodesInGroups(_clause(format, "codes"), rows=x, format=format)
    codes, other = want.codes, per_row.admissible_too(x, format)
    if format == "q4":
        codes, other = (_packed(part) for part in (codes, other))
    parts = [ExpectedReads(codes, other.astype(np.float64)), ExpectedReads(want.scale, np.spacing(want.scale).astype(np.float64))]
    if format in AFFINE_FORMATS:
        parts.append(exact_reads(want.zero))
    return LeadingRows(_clause(format, "codes"), names=("codes", "scale", "zero")[: len(parts)], parts=tuple(parts))


def _packed(codes: NDArray) -> NDArray:
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    both: NDArray = padded[:, 0::2] + 16 * padded[:, 1::2]
    return both
