"""Formats of groups in NumPy (FMT-GROUP, FMT-MX): functions over chunks [n, group] that fit into the processor's cache.

Groups are short, and a NumPy reduction starts a loop per group. The largest and least numbers are therefore computed by halving
all groups at once (`folded`). Codes with fewer than 8 bits are packed eight at a time, as 64-bit integers. To dequantize, a table
gives the numbers of all codes in a byte. Elements of 4 bits are found by comparison with the midpoints between them, which
rounds.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.formats.base import check_read_back
from kvref.formats.group_scales import LEAST, GroupFormat
from kvref.formats.microscaling import E8M0_BIAS, E8M0_NAN, NVFP4, Int8Element, Microscaled
from kvref.formats.small_float import BFLOAT16, E2M1, E4M3FN, SmallFloat
from kvref_numpy.rows import BELOW_HALF, F32, U8, decode, encode, encode_bfloat16, finite, folded, scratch, values_of

# The midpoints between elements of E2M1, and whether a midpoint is rounded up: ties go to the even code (FMT-MX-03).
E2M1_MIDPOINTS = tuple((np.float32(point), code % 2 == 1) for code, point in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))


def quantize_groups(x: F32, codes: U8, scale: Array, zero: Array | None = None, *, format: GroupFormat) -> None:
    """Quantize x [n, group] to codes [n, bytes], scale and zero [n, 1]. Raises NonFinite."""
    if zero is None:
        _symmetric(x, codes, scale, format)
    else:
        _affine(x, codes, scale, zero, format)


def dequantize_groups(y: F32, codes: U8, scale: Array, zero: Array | None = None, *, format: GroupFormat) -> None:
    """Write the numbers of codes [n, bytes] to y [n, group]."""
    if format.bits == 8:
        np.copyto(y, codes if format.affine else codes.view(np.int8))
    else:
        _look_up(codes, y, format.bits, format.affine)
    np.multiply(y, _as_float32(scale, format.scale.name), out=y)
    if zero is not None:
        np.add(y, _as_float32(zero, format.scale.name), out=y)  # the second rounding (FMT-GROUP-04)


def _symmetric(x: F32, codes: U8, scale: Array, format: GroupFormat) -> None:
    quotient = scratch.like(x, np.float32)
    np.abs(x, out=quotient)
    exact = finite(folded(np.maximum, quotient.view(np.int32))) / np.full((len(x), 1), format.top, np.float32)
    held = _stored(np.maximum(exact, np.float32(LEAST[format.scale.name])), scale, format.scale.name)
    with np.errstate(over="ignore"):
        check_read_back(format.name, held * np.float32(format.top))
    np.divide(quotient, held, out=quotient)
    np.add(quotient, BELOW_HALF, out=quotient)
    np.clip(quotient, np.float32(0), np.float32(format.top), out=quotient)
    whole = codes if format.bits == 8 else scratch.like(x, np.uint8, 3)
    np.copyto(whole, quotient, casting="unsafe")  # truncates
    negative = scratch.like(x, np.uint8, 2)
    np.less(x, 0, out=negative.view(np.bool_))
    np.negative(negative, out=negative)  # 255 where x is negative: (q ^ 255) - 255 is -q
    np.bitwise_xor(whole, negative, out=whole)
    np.subtract(whole, negative, out=whole)
    if format.bits < 8:
        np.bitwise_and(whole, np.uint8(2**format.bits - 1), out=whole)
        _pack(whole, codes, format.bits)


def _affine(x: F32, codes: U8, scale: Array, zero: Array, format: GroupFormat) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        least = _stored(folded(np.minimum, x) + np.float32(0), zero, format.scale.name)
        exact = (folded(np.maximum, x) - least) / np.full((len(x), 1), format.top, np.float32)
        held = _stored(np.maximum(exact, np.float32(LEAST[format.scale.name])), scale, format.scale.name)
        check_read_back(format.name, held * np.float32(format.top) + least)
    quotient = scratch.like(x, np.float32)
    np.subtract(x, least, out=quotient)
    np.divide(quotient, held, out=quotient)
    np.add(quotient, BELOW_HALF, out=quotient)
    np.clip(quotient, np.float32(0), np.float32(format.top), out=quotient)
    whole = codes if format.bits == 8 else scratch.like(x, np.uint8, 3)
    np.copyto(whole, quotient, casting="unsafe")
    if format.bits < 8:
        _pack(whole, codes, format.bits)


def quantize_microscaled(x: F32, codes: U8, scale: U8, *, format: Microscaled) -> None:
    """Quantize x [n, group] to codes [n, bytes] and scale codes [n, 1]. Raises NonFinite."""
    quotient = scratch.like(x, np.float32)
    np.abs(x, out=quotient)
    largest = finite(folded(np.maximum, quotient.view(np.int32)))
    if isinstance(format, NVFP4):
        encode(np.clip(largest / np.full_like(largest, format.small.max), np.float32(2.0**-6), np.float32(448)), scale, E4M3FN)
        np.divide(x, values_of(E4M3FN)[scale], out=quotient)
    else:
        exponent = (largest.view(np.int32) >> 23) - (int(format.small.max).bit_length() - 1)
        np.copyto(scale, np.clip(exponent, 0, E8M0_NAN - 1), casting="unsafe")
        np.multiply(x, _power(2 * E8M0_BIAS - scale.astype(np.int32)), out=quotient)
    small, whole = format.small, codes if format.bits == 8 else scratch.like(x, np.uint8, 3)
    if isinstance(small, Int8Element):
        np.clip(quotient, np.float32(-small.max), np.float32(small.max), out=quotient)
        np.multiply(quotient, np.float32(64), out=quotient)
        np.rint(quotient, out=quotient)
        np.copyto(whole.view(np.int8), quotient, casting="unsafe")
    elif small is E2M1:
        _encode_e2m1(quotient, whole)
    else:
        if small.infinity is not None:  # `encode` clips in the other types
            np.clip(quotient, np.float32(-small.max), np.float32(small.max), out=quotient)
        encode(quotient, whole, small)
    if format.bits < 8:
        _pack(whole, codes, format.bits)


def _encode_e2m1(values: F32, codes: U8) -> None:
    """Write E2M1 codes of `values`, which it overwrites."""
    beyond = scratch.like(values, np.uint8, 1)
    np.signbit(values, out=codes.view(np.bool_))
    np.left_shift(codes, 3, out=codes)
    np.abs(values, out=values)
    for midpoint, takes in E2M1_MIDPOINTS:
        (np.greater_equal if takes else np.greater)(values, midpoint, out=beyond.view(np.bool_))
        np.add(codes, beyond, out=codes)


def dequantize_microscaled(y: F32, codes: U8, scale: U8, *, format: Microscaled) -> None:
    """Write the numbers of codes [n, bytes] to y [n, group]."""
    small = format.small
    if isinstance(small, Int8Element):
        np.copyto(y, codes.view(np.int8))
        np.multiply(y, np.float32(2.0**-6), out=y)
    elif small.bits == 8:
        decode(codes, y, small)
    else:
        _look_up(codes, y, small.bits, small)
    if isinstance(format, NVFP4):
        np.multiply(y, values_of(E4M3FN)[scale], out=y)
    else:
        with np.errstate(over="ignore"):
            np.multiply(y, np.where(scale == E8M0_NAN, np.float32(np.nan), _power(scale.astype(np.int32))), out=y)


def _power(code: NDArray[np.int32]) -> F32:
    """2^(code - 127), exactly, also 2^-127, which is subnormal."""
    return np.asarray(np.where(code == 0, np.int32(1 << 22), code << 23).astype(np.int32).view(np.float32))


def _stored(values: F32, out: Array, dtype: str) -> F32:
    """Write scales or zeros [n, 1] to `out` in their dtype, and return them rounded, as float32."""
    if dtype == BFLOAT16.name:
        encode_bfloat16(values, out, BFLOAT16)
    else:
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="same_kind")
    return _as_float32(out, dtype)


def _as_float32(stored: Array, dtype: str) -> F32:
    """Stored scales or zeros as float32."""
    if dtype == BFLOAT16.name and stored.dtype == np.uint16:
        return np.asarray((stored.astype(np.uint32) << 16).view(np.float32))
    return np.asarray(stored, np.float32)


def _pack(whole: U8, codes: U8, bits: int) -> None:
    """Pack codes [n, group], one per byte, to [n, group * bits / 8] (FMT-SMALL-01): first pairs, then pairs of pairs."""
    eight, wide = whole.reshape(-1).view(np.uint64), bits
    lower, upper = scratch.like(eight, np.uint64, 1), scratch.like(eight, np.uint64, 2)
    for lane in (16,) if bits == 4 else (16, 32):
        mask = sum((2**wide - 1) << at for at in range(0, 64, lane))
        np.bitwise_and(eight, np.uint64(mask), out=lower)
        np.right_shift(eight, np.uint64(lane // 2 - wide), out=upper)
        np.bitwise_and(upper, np.uint64(mask << wide), out=upper)
        np.bitwise_or(lower, upper, out=eight)
        wide *= 2
    target = codes.reshape(-1)
    if bits == 6:  # three of every four bytes
        for byte in range(3):
            target[byte::3] = whole.reshape(-1)[byte::4]
    else:
        np.copyto(target, eight.view(np.uint16 if bits == 4 else np.uint32), casting="unsafe")


def _look_up(codes: U8, y: F32, bits: int, element: SmallFloat | bool) -> None:
    """Write the numbers of packed codes to y, two or four per table entry."""
    packed = codes.reshape(-1)
    if bits == 6:
        low, middle, high = (packed[byte::3].astype(np.intp) for byte in range(3))
        index = np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], axis=-1).reshape(-1)
    else:
        index = scratch.like(packed, np.intp)
        np.copyto(index, packed)
    table = _table(bits, element)
    np.take(table, index, out=y.reshape(-1).view(table.dtype), mode="clip")


@cache
def _table(bits: int, element: SmallFloat | bool) -> Array:
    """The numbers of all codes in a byte, or with 6 bits in 12 bits. element: a float type, or whether integers are unsigned."""
    codes = np.arange(2**bits)
    if isinstance(element, SmallFloat):
        values = values_of(element)
    else:
        values = np.where((codes >= 2 ** (bits - 1)) & (not element), codes - 2**bits, codes).astype(np.float32)
    count = 2 if bits == 6 else 8 // bits
    each = np.arange(2 ** (bits * count))[:, None] >> bits * np.arange(count) & 2**bits - 1
    return np.asarray(values[each].reshape(-1).view(np.uint64 if count == 2 else np.complex128))
