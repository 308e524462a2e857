"""Formats with one scale per row, static FP8 and single FP8 numbers in NumPy.

The functions are for chunks [n, width] that fit into the processor's cache. They overwrite codes and scales, which the caller
allocates, and use scratch memory.
"""

import threading
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.errors import NonFinite
from kvref.formats import SmallFloat
from kvref.formats.base import check_read_back
from kvref.formats.row_scales import LEAST_SCALE, SymmetricRow
from kvref.formats.small_float import ELEMENTS
from kvref.formats.static_scales import StaticFloat8
from kvref.formats.token_scales import LEAST_SCALE as LEAST_AFFINE_SCALE
from kvref.formats.token_scales import AffineRow
from kvref_numpy.attention import all_finite

BLOCK = 2**16  # numbers per chunk: 256 KiB of float32
BELOW_HALF = np.float32(0.49999997)  # the float32 below one half: trunc(y + this) rounds halves away from zero, for y >= 0
INFINITY_BITS = 0x7F800000
KEPT_BITS = 14  # of a float32 pattern: sign, exponent and 5 bits of mantissa, two more than any FP8 type
FOLDED = 64  # width up to which halving all rows at once is faster than a loop per row

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class _Scratch(threading.local):
    """Scratch memory for one chunk, per thread. It is allocated once: fresh memory would take longer than the computation."""

    def __init__(self) -> None:
        self._memory = [np.empty(0, np.int64) for _ in range(4)]

    def like(self, x: Array, dtype: type, which: int = 0) -> Array:
        """Return scratch array number `which` of four, in the shape of `x`. Its contents are arbitrary."""
        if self._memory[which].nbytes < 8 * x.size:
            self._memory[which] = np.empty(max(BLOCK, x.size), np.int64)
        return self._memory[which].view(dtype)[: x.size].reshape(x.shape)


scratch = _Scratch()


def folded(ufunc: np.ufunc, x: Array) -> Array:
    """Return ufunc.reduce of each row: [n, width] -> [n, 1]."""
    if x.shape[1] > FOLDED or x.shape[1].bit_count() > 1:  # wide, or not a power of two
        return ufunc.reduce(x, axis=-1, keepdims=True)
    left = x.reshape(-1)
    while len(left) > len(x):
        left = ufunc(left[0::2], left[1::2])
    return left[:, None]


def finite(largest: NDArray[np.int32]) -> F32:
    """Return magnitudes, given as bit patterns, as floats. Raises NonFinite for infinity and NaN, the largest patterns."""
    if largest.max() >= INFINITY_BITS:
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    return largest.view(np.float32)


def quantize_symmetric(x: F32, codes: Array, scale: F32, format: SymmetricRow) -> None:
    """Quantize x [n, width] to codes [n, width] and scale [n, 1]. Raises NonFinite."""
    magnitude = scratch.like(x, np.float32)
    np.abs(x, out=magnitude)
    largest = finite(folded(np.maximum, magnitude.view(np.int32)))
    np.divide(largest, np.full(largest.shape, format.limit, np.float32), out=scale)
    np.maximum(scale, np.float32(LEAST_SCALE), out=scale)
    with np.errstate(over="ignore"):
        check_read_back(format.name, scale.max() * np.full(1, format.limit, np.float32))
    if format.name != "int8":
        np.divide(x, scale, out=magnitude)  # at most one ulp beyond the largest code, to which it is rounded
        encode(magnitude, codes, ELEMENTS[format.name])
        return
    np.divide(magnitude, scale, out=magnitude)
    np.add(magnitude, BELOW_HALF, out=magnitude)
    np.copyto(codes, magnitude, casting="unsafe")  # truncates
    negative = scratch.like(x, np.int8)
    np.less(x, 0, out=negative.view(np.bool_))
    np.negative(negative, out=negative)  # -1 where x is negative: (q ^ -1) - -1 is -q
    np.bitwise_xor(codes, negative, out=codes)
    np.subtract(codes, negative, out=codes)


def quantize_affine(x: F32, codes: Array, scale: F32, zero: F32, format: AffineRow) -> None:
    """Quantize x [n, width] to codes [n, bytes], scale and zero [n, 1]. Raises NonFinite."""
    np.min(x, axis=-1, keepdims=True, out=zero)
    most = np.max(x, axis=-1, keepdims=True)
    if not all_finite(np, zero, most):
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    steps = np.float32(2**format.bits - 1)
    with np.errstate(over="ignore"):
        np.divide(most - zero, np.full_like(most, steps), out=scale)
        np.maximum(scale, np.float32(LEAST_AFFINE_SCALE), out=scale)
        check_read_back(format.name, scale * steps + zero)
    quotient = scratch.like(x, np.float32)
    np.subtract(x, zero, out=quotient)
    np.divide(quotient, scale, out=quotient)
    np.add(quotient, BELOW_HALF, out=quotient)
    np.minimum(quotient, steps, out=quotient)
    if format.bits == 8:
        np.copyto(codes, quotient, casting="unsafe")
        return
    whole = scratch.like(x, np.uint8, 1)
    np.copyto(whole, quotient, casting="unsafe")
    np.copyto(codes, whole[:, 0::2])
    codes[:, : x.shape[-1] // 2] |= whole[:, 1::2] << 4


def quantize_static(x: F32, codes: Array, format: StaticFloat8) -> None:
    """Quantize x [n, width] to codes [n, width] with a given scale. Raises NonFinite."""
    quotient, most = scratch.like(x, np.float32), np.float32(format.small.max)
    np.abs(x, out=quotient)
    finite(quotient.view(np.int32))
    with np.errstate(over="ignore"):  # a quotient that overflows is clipped too
        np.divide(x, np.float32(format.scale), out=quotient)
    np.clip(quotient, -most, most, out=quotient)
    encode(quotient, codes, format.small)


def dequantize_static(y: F32, codes: Array, format: StaticFloat8) -> None:
    """Write the numbers of codes to y [n, width]."""
    decode(codes, y, format.small)
    np.multiply(y, np.float32(format.scale), out=y)


def dequantize_row(y: F32, codes: Array, scale: F32, zero: F32 | None = None, *, format: AffineRow | SymmetricRow) -> None:
    """Write the numbers of codes to y [n, width]. scale, zero: [n, 1]."""
    width = y.shape[-1]
    if format.name == "q4":
        y[:, 0::2] = codes[:, : -(-width // 2)] & 15
        y[:, 1::2] = codes[:, : width // 2] >> 4
    elif format.name in ("int8", "q8"):
        np.copyto(y, codes)
    else:
        decode(codes, y, ELEMENTS[format.name])
    np.multiply(y, scale, out=y)
    if zero is not None:
        np.add(y, zero, out=y)  # the second rounding (FMT-AFF-04)


def encode(values: F32, codes: Array, element: SmallFloat) -> None:
    """Write the FP8 codes of values, from a table of the upper KEPT_BITS bits of the float32 pattern.

    The last of these bits is set if any lower bit is: rounding to odd, with two bits more than the type has. Rounding this number
    to the type gives the same code as rounding the value itself.
    """
    bits = values.view(np.uint32)
    upper, lower = scratch.like(values, np.uint32, 1), scratch.like(values, np.uint32, 2)
    shift = 32 - KEPT_BITS
    rest = np.uint32(2**shift - 1)
    np.bitwise_and(bits, rest, out=lower)
    np.add(lower, rest, out=lower)
    np.right_shift(lower, shift, out=lower)  # 1 where any lower bit is set
    np.right_shift(bits, shift, out=upper)
    np.bitwise_or(upper, lower, out=upper)
    index = scratch.like(values, np.intp, 2)
    np.copyto(index, upper)
    np.take(_codes(element), index, out=codes, mode="clip")


def encode_bfloat16(values: F32, codes: Array, element: SmallFloat) -> None:
    """Write the bfloat16 codes of values."""
    bits = values.view(np.uint32)
    upper, odd = scratch.like(values, np.uint32, 1), scratch.like(values, np.uint32, 2)
    np.right_shift(bits, 16, out=upper)
    np.bitwise_and(upper, np.uint32(1), out=odd)
    np.add(odd, np.uint32(0x7FFF), out=odd)
    np.add(bits, odd, out=odd)  # half a unit of the last place, and one more if the code would be odd: ties to even
    np.right_shift(odd, 16, out=odd)
    np.copyto(codes, odd, casting="unsafe")
    nan = np.isnan(values)
    if nan.any():
        codes[nan] = upper[nan] | np.uint32(element.nan or 0)


def decode(codes: Array, values: F32, element: SmallFloat) -> None:
    """Write the numbers of codes of at most 8 bits to `values`."""
    index = scratch.like(values, np.intp)
    np.copyto(index, codes)
    np.take(values_of(element), index, out=values, mode="clip")


@cache
def _codes(element: SmallFloat) -> Array:
    """The code of every float32 whose lower bits are zero, by its upper bits: uint8 [2^KEPT_BITS]."""
    patterns = np.arange(2**KEPT_BITS, dtype=np.uint32) << (32 - KEPT_BITS)
    with np.errstate(over="ignore"):  # numbers beyond the range of the type
        return np.asarray(element.encode(patterns.view(np.float32)))


@cache
def values_of(element: SmallFloat) -> Array:
    """Return the number of every code: float32 [2^bits]."""
    return np.asarray(element.decode(np.arange(2**element.bits, dtype=np.uint8)))
