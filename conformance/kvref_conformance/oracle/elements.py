"""Small floats by their definition: every code's exact value, and nearest-even by counting the steps between those values."""

from fractions import Fraction
from functools import cache

import numpy as np

from kvref_conformance.arrays import NDArray

# name: exponent bits, mantissa bits, and what its last exponent has: infinity and NaN, NaN alone as its last code, or numbers
_SHAPES = {
    "float8_e4m3fn": (4, 3, "NaN"),
    "float8_e5m2": (5, 2, "infinity"),
    "float16": (5, 10, "infinity"),
    "bfloat16": (8, 7, "infinity"),
    "float6_e3m2": (3, 2, ""),
    "float6_e2m3": (2, 3, ""),
    "float4_e2m1": (2, 1, ""),
}
MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float16": 65504.0, "bfloat16": (2.0 - 2.0**-7) * 2.0**127}
TIE_TO_INFINITY = {"float8_e5m2": 61440.0, "float16": 65520.0}


def exact_value(code: int, format: str) -> Fraction | float:
    """The value of a code: a fraction, or a float NaN or infinity."""
    exponent_bits, mantissa_bits, has = _SHAPES[format]
    sign = Fraction(-1 if code >> (exponent_bits + mantissa_bits) else 1)
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    mantissa = code % 2**mantissa_bits
    if exponent == 2**exponent_bits - 1 and has:
        if has == "infinity":
            return float(sign) * float("inf") if mantissa == 0 else float("nan")
        if mantissa == 2**mantissa_bits - 1:
            return float("nan")
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * Fraction(mantissa, 2**mantissa_bits) * _power(1 - bias)
    return sign * (1 + Fraction(mantissa, 2**mantissa_bits)) * _power(exponent - bias)


def _power(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


@cache
def decoded(format: str) -> NDArray:
    """float32 values of all codes, in order of the code; exact, -0 included."""
    exponent_bits, mantissa_bits, has = _SHAPES[format]
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes % 2**mantissa_bits
    # `exact_value` of each, which takes a second: whole numbers of the smallest step, in float64, which has room for all.
    steps = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits).astype(np.float64)
    values = np.ldexp(steps, np.maximum(exponent, 1) - 2 ** (exponent_bits - 1) + 1 - mantissa_bits)
    if has:
        nans = 2**mantissa_bits - 1 if has == "infinity" else 1
        values[-nans:] = np.nan
        if has == "infinity":
            values[-nans - 1] = np.inf
    both = np.concatenate([values, -values]).astype(np.float32)
    both[np.isnan(both)] = np.nan  # of either sign the same
    return both


@cache
def magnitudes(format: str) -> NDArray:
    """The finite values from 0 up, float64, by code: strictly increasing."""
    values = decoded(format)[: len(decoded(format)) // 2].astype(np.float64)
    return values[np.isfinite(values)]


@cache
def midpoints(format: str) -> NDArray:
    """Halfway between neighbours, float64 and exact; last, halfway to what would follow the largest."""
    values = magnitudes(format)
    beyond = 2 * values[-1] - values[-2]
    return (np.append(values[1:], beyond) + values) / 2


def encode(x: NDArray, format: str) -> NDArray:
    """Codes of float32 values: nearest, ties to even. NaN and overflow as the specification says; only numbers where all are."""
    x = np.asarray(x, dtype=np.float32)
    exponent_bits, mantissa_bits, has = _SHAPES[format]
    last, has_infinity, bias = len(magnitudes(format)) - 1, has == "infinity", 2 ** (exponent_bits - 1) - 1
    magnitude = np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64)
    exponent = np.frexp(np.maximum(magnitude, 2.0 ** (1 - bias)))[1] - 1  # the smallest numbers lie as far apart as those above
    steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent)).astype(np.int64)  # exact but for rint, which ties to even
    code = steps + (exponent + bias - 1) * 2**mantissa_bits  # even where steps are
    infinite_or_nan = last + 1  # the next code: infinity in E5M2, NaN in E4M3FN
    finite = np.minimum(code, infinite_or_nan if has_infinity else last)  # overflow: infinity, or saturation
    code = np.where(np.isinf(x), infinite_or_nan, finite)
    code = np.where(np.isnan(x), infinite_or_nan + (1 if has_infinity else 0), code)
    signed: NDArray = code + np.signbit(x) * len(decoded(format)) // 2
    return signed


def round_to(x: NDArray, format: str) -> NDArray:
    """float32 values rounded to a format and back, float32."""
    if format == "float32":
        return np.asarray(x, dtype=np.float32)
    return decoded(format)[encode(x, format)]


def ties_and_neighbours(format: str) -> NDArray:
    """Every tie between two codes with the float32 on either side, both signs, float32."""
    ties = midpoints(format).astype(np.float32)
    ties = ties[np.isfinite(ties)]
    near = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))])
    return np.concatenate([near, -near])
