"""Formats with groups by their definition (FMT-GROUP), computed in float64 and rounded to float32 at each step."""

from fractions import Fraction

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import bits_of, group_of, small_floats
from kvref_conformance.oracle.formats.stored_rows import StoredRows, U, round_half_away, round_to_float32, split_groups

MIN_SCALE = {"float32": 2.0**-23, "bfloat16": 2.0**-23, "float16": 2.0**-14}  # the smallest scale


def is_affine(format: str) -> bool:
    """Whether the format has zeros."""
    return format.startswith("u")


def scale_dtype(format: str) -> str:
    """The dtype of the scales and zeros."""
    return format.rpartition("_")[2]


def top_of(format: str) -> int:
    """The largest code."""
    bits = bits_of(format)
    return int(2 ** (bits if is_affine(format) else bits - 1)) - 1


@np.errstate(over="ignore", invalid="ignore")
def store(rows: NDArray, format: str) -> StoredRows:
    """Quantize rows."""
    x, top, dtype = split_groups(rows, group_of(format)), top_of(format), scale_dtype(format)
    zero = _round_to_scale_dtype(x.min(axis=2) + 0.0, dtype) if is_affine(format) else np.zeros(x.shape[:2])
    reach = round_to_float32(x.max(axis=2) - zero) if is_affine(format) else np.abs(x).max(axis=2)
    scale = _round_to_scale_dtype(np.maximum(round_to_float32(reach / top), MIN_SCALE[dtype]), dtype)
    s, z = scale[:, :, None], zero[:, :, None]
    codes = np.clip(round_half_away(round_to_float32(round_to_float32(x - z) / s)), 0 if is_affine(format) else -top, top) + 0.0
    codes = np.where(np.isfinite(codes), codes, 0)  # for rows that must raise NonFinite
    values = round_to_float32(codes * s)
    values = round_to_float32(values + z) if is_affine(format) else values
    ends = round_to_float32(round_to_float32(top * s) + z)  # the value of the largest code must be finite too (FMT-LEVEL-05)
    values = np.where(np.isfinite(ends), values, np.inf)
    flat = np.shape(rows)
    return StoredRows(
        codes.astype(np.int64).reshape(flat), _to_float32(scale), _to_float32(zero), _to_float32(values).reshape(flat)
    )


def _to_float32(x: NDArray) -> NDArray:
    return x.astype(np.float32)


def _round_to_scale_dtype(x: NDArray, dtype: str) -> NDArray:
    """Round float32 numbers to the dtype of the scales."""
    return small_floats.round_to(x.astype(np.float32), dtype).astype(np.float64)


def bound(rows: NDArray, codes: NDArray, scale: NDArray, zero: NDArray, format: str) -> NDArray:
    """The largest |x - value|, float64 [n, width]: half a step or the clipped part, and the roundings."""
    x, s, z = (
        split_groups(rows, group_of(format)),
        np.asarray(scale, np.float64)[:, :, None],
        np.asarray(zero, np.float64)[:, :, None],
    )
    offset, product = x - z, np.abs(split_groups(codes, group_of(format))) * s
    if not is_affine(format):
        half = np.maximum(s / 2, np.abs(x) - top_of(format) * s)
        return (half + U * np.abs(x) + U * product).reshape(np.shape(rows))
    half = np.maximum(np.maximum(s / 2, offset - top_of(format) * s), -offset)
    rounding = (2 * U + U * U) * np.abs(offset) + U * product + U * (1 + 2 * U) * np.abs(product + z) + 2.0**-149
    return (half + rounding).reshape(np.shape(rows))


def clearly_admissible(codes: NDArray, quotient: NDArray, format: str) -> NDArray:
    """Where codes are admissible even with the rounding errors of float64 quotients, bool."""
    least, top = 0 if is_affine(format) else -top_of(format), top_of(format)
    near = np.abs(np.clip(quotient, least, top) - codes) <= 0.5 - 2.0**-20
    return np.asarray(near & (codes >= least) & (codes <= top))


def admits(code: int, quotient: Fraction, slack: Fraction, format: str) -> bool:
    """Whether a code is admissible: at most half a step from the quotient, which is clipped to the range of codes."""
    top = top_of(format)
    least = 0 if is_affine(format) else -top
    within = min(max(quotient, Fraction(least)), Fraction(top))
    return least <= code <= top and abs(within - code) <= Fraction(1, 2) + slack
