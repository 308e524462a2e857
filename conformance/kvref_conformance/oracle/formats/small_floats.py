"""Small floats by their definition: the exact value of each code, and rounding to the nearest code, ties to even."""

from fractions import Fraction
from functools import cache

import numpy as np

from kvref_conformance.implementation_api import NDArray

# name: (exponent bits, mantissa bits, use of the largest exponent): "infinity": infinity and NaNs; "NaN": numbers, and NaN as the
# last code; "": numbers only.
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
    """The exact value of a code: a Fraction, or NaN or an infinity as a float."""
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
    """The exact values of all codes, float32, indexed by code. -0 is distinct."""
    exponent_bits, mantissa_bits, has = _SHAPES[format]
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes % 2**mantissa_bits
    # The same as `exact_value` of each code, which would take a second: integer multiples of the smallest step, exact in float64.
    steps = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits).astype(np.float64)
    values = np.ldexp(steps, np.maximum(exponent, 1) - 2 ** (exponent_bits - 1) + 1 - mantissa_bits)
    if has:
        nans = 2**mantissa_bits - 1 if has == "infinity" else 1
        values[-nans:] = np.nan
        if has == "infinity":
            values[-nans - 1] = np.inf
    both = np.concatenate([values, -values]).astype(np.float32)
    both[np.isnan(both)] = np.nan  # the same NaN for both signs
    return both


@cache
def magnitudes(format: str) -> NDArray:
    """The finite values of the positive codes, float64, indexed by code; strictly increasing from 0."""
    values = decoded(format)[: len(decoded(format)) // 2].astype(np.float64)
    return values[np.isfinite(values)]


@cache
def midpoints(format: str) -> NDArray:
    """The midpoints between neighboring values, float64 and exact; the last is between the largest value and the next step."""
    values = magnitudes(format)
    beyond = 2 * values[-1] - values[-2]
    return (np.append(values[1:], beyond) + values) / 2


def encode(x: NDArray, format: str) -> NDArray:
    """The codes of float32 values: nearest, ties to even. NaN and overflow as specified (FMT).

    In formats without NaN, the values must be numbers.
    """
    x = np.asarray(x, dtype=np.float32)
    exponent_bits, mantissa_bits, has = _SHAPES[format]
    last, has_infinity, bias = len(magnitudes(format)) - 1, has == "infinity", 2 ** (exponent_bits - 1) - 1
    magnitude = np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64)
    exponent = np.frexp(np.maximum(magnitude, 2.0 ** (1 - bias)))[1] - 1  # subnormals: the exponent of the least normal number
    steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent)).astype(np.int64)  # exact, except rint, which ties to even
    code = steps + (exponent + bias - 1) * 2**mantissa_bits  # even exactly if `steps` is
    infinite_or_nan = last + 1  # the next code: infinity in E5M2, NaN in E4M3FN
    finite = np.minimum(code, infinite_or_nan if has_infinity else last)  # overflow: infinity, or saturation
    code = np.where(np.isinf(x), infinite_or_nan, finite)
    code = np.where(np.isnan(x), infinite_or_nan + (1 if has_infinity else 0), code)
    signed: NDArray = code + np.signbit(x) * len(decoded(format)) // 2
    return signed


def round_to(x: NDArray, format: str) -> NDArray:
    """Round float32 values to a format, and return float32."""
    if format == "float32":
        return np.asarray(x, dtype=np.float32)
    return decoded(format)[encode(x, format)]


def ties_and_neighbours(format: str) -> NDArray:
    """All midpoints between two codes, and the float32 numbers next to each midpoint, with both signs, float32."""
    ties = midpoints(format).astype(np.float32)
    ties = ties[np.isfinite(ties)]
    near = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))])
    return np.concatenate([near, -near])
