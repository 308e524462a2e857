"""The formats of ggml in NumPy (FMT-GGML): functions over chunks [n, 32] that fit into the processor's cache.

A block is a NumPy record with its codes as 64-bit integers, by which they are packed and unpacked eight at a time. IQ4_NL is
computed on the transposed array, with a block per column: it has to add the numbers of a block in order, and does so for all
blocks at once.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from kvref.array import Array
from kvref.errors import NonFinite
from kvref.formats.base import check_read_back
from kvref.formats.ggml import GGML, GROUP, IQ4_EPSILON, IQ4_VALUES, IQ4NL, LEAST_INVERTIBLE
from kvref_numpy.rows import BELOW_HALF, F32, U8, finite, folded, scratch


def quantize_ggml(x: F32, codes: U8, *, format: GGML) -> None:
    """Quantize x [n, 32] to blocks, codes [n, bytes]. Raises NonFinite."""
    block, whole = codes.view(_layout(format))[:, 0], scratch.like(x, np.uint8, 1)
    quotient, top = scratch.like(x, np.float32), 2**format.bits - 1
    with np.errstate(over="ignore", invalid="ignore"):  # _hold raises on overflow
        if format.affine:
            least = np.take_along_axis(x, np.argmin(x, axis=-1, keepdims=True), axis=-1)  # of 0.0 and -0.0 the first one
            scale = (folded(np.maximum, x) - least + np.float32(0)) / np.full_like(least, top)
            np.subtract(x, least, out=quotient)
            _hold(block, "m", least, format)
        else:
            np.abs(x, out=quotient)
            if format.bits == 8:
                scale = finite(folded(np.maximum, quotient.view(np.int32))) / np.full((len(x), 1), 127, np.float32)
            else:
                where = np.argmax(quotient.view(np.int32), axis=-1, keepdims=True)
                largest = np.take_along_axis(x, where, axis=-1) + np.float32(0)
                scale = largest / np.full_like(largest, -(2 ** (format.bits - 1)))
        _hold(block, "d", scale, format)
    np.multiply(quotient if format.affine else x, _inverse(scale), out=quotient)
    if format.bits == 8:
        np.add(quotient, np.copysign(BELOW_HALF, quotient), out=quotient)
        np.copyto(whole.view(np.int8), quotient, casting="unsafe")
        block["q"] = whole.view(np.uint64)
        return
    np.add(quotient, np.float32(0.5 if format.affine else 2 ** (format.bits - 1) + 0.5), out=quotient)
    np.clip(quotient, np.float32(0), np.float32(top), out=quotient)
    np.copyto(whole, quotient, casting="unsafe")
    if format.bits == 5:
        block["h"] = np.packbits(whole.reshape(-1) & 16, bitorder="little").view(np.uint32)
        np.bitwise_and(whole, 15, out=whole)
    eight = whole.view(np.uint64)
    np.bitwise_or(eight[:, :2], eight[:, 2:] << np.uint64(4), out=block["q"])


def quantize_iq4_nl(x: F32, codes: U8, *, format: IQ4NL) -> None:
    """Quantize x [n, 32] to blocks of IQ4_NL, codes [n, bytes]. It computes on [32, n]: see the module. Raises NonFinite."""
    block, turned = codes.view(_layout(format))[:, 0], scratch.like(x, np.float32).reshape(GROUP, -1)
    np.copyto(turned, x.T)
    most, least = np.max(turned, axis=0), np.min(turned, axis=0)
    largest = np.where(-least > most, least, most)
    either = np.flatnonzero(-least == most)  # both magnitudes are equal: the first number counts
    largest[either] = np.take_along_axis(x[either], np.argmax(np.abs(x[either]), axis=-1, keepdims=True), axis=-1)[:, 0]
    if not np.isfinite(largest).all():
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    empty = np.abs(largest) < np.float32(IQ4_EPSILON)
    first = np.where(empty, np.float32(1), largest) / np.full_like(largest, IQ4_VALUES[0])
    index, worth = scratch.like(turned, np.intp, 1), scratch.like(turned, np.float32, 2)
    np.multiply(turned, np.float32(1) / first, out=worth)
    np.multiply(worth, np.float32(2), out=worth)  # midpoints become integers
    np.floor(worth, out=worth)
    np.add(worth, np.float32(256), out=worth)
    np.copyto(index, worth, casting="unsafe")
    nearest, values = _iq4_tables()
    whole = scratch.like(turned, np.uint8, 3)
    np.take(nearest, index, out=whole, mode="clip")
    np.take(values, index, out=worth, mode="clip")
    with np.errstate(over="ignore", invalid="ignore"):
        product = scratch.like(turned, np.float32, 1)
        np.multiply(turned, turned, out=product)
        np.multiply(product, worth, out=product)
        np.multiply(worth, product, out=worth)  # x^2 t^2
        np.multiply(product, turned, out=product)  # x^2 t x
        fitted = _in_order(product) / np.where(empty, np.float32(1), _in_order(worth))
        _hold(block, "d", np.where(empty, np.float32(0), fitted)[:, None], format)
    half = GROUP // 2
    np.left_shift(whole[half:], 4, out=whole[half:])
    np.bitwise_or(whole[:half], whole[half:], out=whole[:half])
    np.copyto(codes[:, -half:], whole[:half].T)


def dequantize_ggml(y: F32, codes: U8, *, format: GGML) -> None:
    """Write the numbers of blocks [n, bytes] to y [n, 32]."""
    codes = codes if codes.strides[-1] == 1 else np.ascontiguousarray(codes)
    block, whole = codes.view(_layout(format))[:, 0], scratch.like(y, np.uint8, 1)
    eight, scale = whole.view(np.uint64), block["d"].astype(np.float32)[:, None]
    if format.bits == 8:
        eight[:] = block["q"]
        np.copyto(y, whole.view(np.int8))
    else:
        held = block["q"]
        np.bitwise_and(held, np.uint64(0x0F0F0F0F0F0F0F0F), out=eight[:, :2])
        np.bitwise_and(held >> np.uint64(4), np.uint64(0x0F0F0F0F0F0F0F0F), out=eight[:, 2:])
        if format.bits == 5:
            fifth = np.unpackbits(np.ascontiguousarray(block["h"]).view(np.uint8), bitorder="little")
            np.bitwise_or(whole, (fifth << 4).reshape(whole.shape), out=whole)
        if isinstance(format, IQ4NL):
            index = scratch.like(y, np.intp, 2)
            np.copyto(index, whole)
            np.take(np.asarray(IQ4_VALUES, np.float32), index, out=y, mode="clip")
        elif format.affine:
            np.copyto(y, whole)
        else:
            np.subtract(whole, np.uint8(2 ** (format.bits - 1)), out=whole)
            np.copyto(y, whole.view(np.int8))
    np.multiply(y, scale, out=y)
    if format.affine:
        np.add(y, block["m"].astype(np.float32)[:, None], out=y)


@cache
def _layout(format: GGML) -> np.dtype[Any]:
    """The record of a block (FMT-GGML-01): scale, least value, fifth bits, and the codes as 64-bit integers."""
    fields: list[Any] = [("d", "<f2")]
    fields += [("m", "<f2")] if format.affine else []
    fields += [("h", "<u4")] if format.bits == 5 else []
    return np.dtype([*fields, ("q", "<u8", (4 if format.bits == 8 else 2,))])


def _hold(block: Array, field: str, values: F32, format: GGML) -> None:
    """Store scales or least values in float16. Raises NonFinite if one overflows."""
    block[field] = values[:, 0]
    check_read_back(format.name, block[field])


def _inverse(scale: F32) -> F32:
    """1 / scale, and 0 if |scale| is below LEAST_INVERTIBLE (FMT-GGML-07)."""
    inverse: F32 = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=np.abs(scale) >= np.float32(LEAST_INVERTIBLE))
    return inverse


def _in_order(values: F32) -> F32:
    """The sum of values [32, n] over the first axis, added in order: in float32 the order affects the result."""
    total: F32 = values[0].copy()
    for each in values[1:]:
        np.add(total, each, out=total)
    return total


@cache
def _iq4_tables() -> tuple[U8, F32]:
    """The code and the number of a quotient q, by floor(2 q) + 256, which reaches a doubled midpoint exactly if 2 q does."""
    doubled = np.arange(-256, 256)
    code = sum((doubled >= below + above).astype(np.uint8) for below, above in pairwise(IQ4_VALUES))
    return np.asarray(code, np.uint8), np.asarray(IQ4_VALUES, np.float32)[code]
