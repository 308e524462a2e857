"""What rows are quantized to, and read back as."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle import elements, rows
from kvref_conformance.oracle.expected import (
    Arrays,
    Expected,
    Leading,
    Refused,
    TakenOrRefused,
    exactly,
    finite,
    float32,
    not_finite,
    refuse,
    wrong_arrays,
)  # fmt: skip
from kvref_conformance.oracle.formats import AFFINE
from kvref_conformance.oracle.model import Function
from kvref_conformance.oracle.rows import Reads


class Rows(Function):
    family = "rows"

    def quantize(self, rows: NDArray, format: str) -> Expected:
        if np.ndim(rows) != 2:
            raise ValueError("rows of another shape")
        if wrong := wrong_arrays((rows, np.shape(rows))):
            return refuse(wrong + not_finite(rows), lambda: None)
        x = float32(rows)
        if not finite(x):
            return TakenOrRefused("LAW-14")
        return _quantized(x, format)

    def dequantize(self, codes: NDArray, scale: NDArray, zero: NDArray | None, width: int, format: str) -> Expected:
        plain = rows.unpack4(codes, width) if format == "q4" else np.asarray(codes).astype(np.int64)
        decoded = plain if format == "int8" or format in AFFINE else elements.decoded(format)[plain]
        values = rows.fl(decoded * np.asarray(scale, np.float64)[:, None])
        if zero is not None:
            values = rows.fl(values + np.asarray(zero, np.float64)[:, None])
        clause = "FMT-AFF-04" if format in AFFINE else "FMT-INT8-03" if format == "int8" else "FMT-FP8-08"
        return Arrays(clause, parts=(exactly(values.astype(np.float32)),))


def _quantized(x: NDArray, format: str) -> Expected:
    want = rows.store(x, format)
    if not np.isfinite(want.scale).all():
        return Refused("FMT-AFF-01", kinds=("NonFinite",))
    if not finite(want.values):  # with a scale an ulp smaller, at level tolerant, they may be
        return TakenOrRefused("FMT-LEVEL-05")
    codes, other = want.codes, rows.admissible_too(x, format)
    if format == "q4":
        codes, other = (_packed(part) for part in (codes, other))
    parts = [Reads(codes, other.astype(np.float64)), Reads(want.scale, np.spacing(want.scale).astype(np.float64))]
    if format in AFFINE:
        parts.append(exactly(want.zero))
    clause = {"int8": "FMT-INT8-02", "q8": "FMT-AFF-02", "q4": "FMT-AFF-02"}.get(format, "FMT-FP8-08")
    return Leading(clause, names=("codes", "scale", "zero")[: len(parts)], parts=tuple(parts))


def _packed(codes: NDArray) -> NDArray:
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    both: NDArray = padded[:, 0::2] + 16 * padded[:, 1::2]
    return both
