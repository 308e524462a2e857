"""MX and NVFP4 by their definition (FMT-MX): the exact value of each element, and the nearest element by comparison."""

from fractions import Fraction

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import NVFP4_FORMATS, group_of, small_floats
from kvref_conformance.oracle.formats.stored_rows import StoredRows, U, round_to_float32, split_groups

# The element of each format, and the exponent of its largest number.
ELEMENT = {
    "mxfp8_e4m3": ("float8_e4m3fn", 8), "mxfp8_e5m2": ("float8_e5m2", 15), "mxfp6_e2m3": ("float6_e2m3", 2),
    "mxfp6_e3m2": ("float6_e3m2", 4), "mxfp4": ("float4_e2m1", 2), "mxint8": ("", 0), "nvfp4": ("float4_e2m1", 2),
}  # fmt: skip


def numbers(format: str) -> NDArray:
    """The value of each code of an element, float64 [2^bits]."""
    element, _ = ELEMENT[format]
    if element:
        return small_floats.decoded(element).astype(np.float64)
    return np.concatenate([np.arange(128), np.arange(-128, 0)]) / 64


def largest(format: str) -> float:
    """The largest element. MXINT8 does not use -128."""
    return float(small_floats.magnitudes(ELEMENT[format][0])[-1]) if ELEMENT[format][0] else 127 / 64


def scale_codes(rows: NDArray, format: str) -> NDArray:
    """The codes of the scales, uint8 [n, groups]: E8M0, or E4M3FN for NVFP4."""
    most = np.abs(split_groups(rows, group_of(format))).max(axis=2)
    if format in NVFP4_FORMATS:
        return small_floats.encode(np.clip(round_to_float32(most / 6), 2.0**-6, 448), "float8_e4m3fn").astype(np.uint8)
    exponent = np.frexp(most)[1] - 1  # floor(log2)
    exponent = np.where(most == 0, -127, np.maximum(exponent - ELEMENT[format][1], -127))
    return (exponent + 127).astype(np.uint8)


def scales(codes: NDArray, format: str) -> NDArray:
    """The values of codes of scales, float64. In E8M0, 255 is NaN."""
    if format in NVFP4_FORMATS:
        return small_floats.decoded("float8_e4m3fn")[np.asarray(codes, np.int64)].astype(np.float64)
    worth = np.ldexp(1.0, np.asarray(codes, np.int64) - 127)
    return np.where(np.asarray(codes) == 255, np.nan, worth)


def encode(quotient: NDArray, format: str) -> NDArray:
    """The codes of the nearest elements, ties to even. Quotients beyond the largest element are clipped."""
    most, element = largest(format), ELEMENT[format][0]
    clipped = np.clip(quotient, -most, most)
    if element:
        return small_floats.encode(clipped, element)
    return np.asarray(np.rint(clipped * 64).astype(np.int64) & 255)


def store(rows: NDArray, format: str) -> StoredRows:
    """Quantize rows. Stored.scale contains the values of the scales."""
    x, held = split_groups(rows, group_of(format)), scale_codes(rows, format)
    scale = scales(held, format)
    s = scale[:, :, None]
    codes = encode(round_to_float32(x / s), format)
    values = numbers(format)[codes] * s
    flat = np.shape(rows)
    return StoredRows(
        codes.reshape(flat), scale.astype(np.float32), np.zeros(scale.shape, np.float32), values.astype(np.float32).reshape(flat)
    )


def bound(rows: NDArray, scale: NDArray, format: str) -> NDArray:
    """The largest |x - value|: half the step between elements, or the clipped part; for NVFP4 also the rounding of x / s."""
    x, s = np.abs(split_groups(rows, group_of(format))), np.asarray(scale, np.float64)[:, :, None]
    worth = np.unique(np.abs(numbers(format)[np.isfinite(numbers(format))]))
    worth = worth[worth <= largest(format)]
    above = np.clip(np.searchsorted(worth, x / s), 1, len(worth) - 1)
    half = (worth[above] - worth[above - 1]) / 2 * s
    if format in NVFP4_FORMATS:
        half = half * (1 + 4 * U) + 2 * U * x
    return np.asarray(np.maximum(half, x - largest(format) * s).reshape(np.shape(rows)))


def admits(code: int, quotient: Fraction, slack: Fraction, format: str) -> bool:
    """Whether a code is admissible: no element is nearer to the clipped quotient by more than the slack."""
    worth = numbers(format)
    if not (0 <= code < len(worth) and np.isfinite(worth[code])):
        return False
    most = Fraction(largest(format))
    within = min(max(quotient, -most), most)
    near = worth[np.isfinite(worth) & (np.abs(worth) <= largest(format))]
    nearest = min(abs(within - Fraction(float(each))) for each in near[np.argsort(np.abs(near - float(within)))[:3]])
    return abs(within - Fraction(float(worth[code]))) <= nearest + 2 * slack
