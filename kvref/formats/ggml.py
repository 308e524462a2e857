"""The cache types of llama.cpp, byte for byte: blocks of 32 numbers, each with its scale before its codes (FMT-GGML).

Codes are computed with the reciprocal of the float32 scale, and the scale is rounded to float16 afterwards. All other formats of
kvref round the scale first. The order of ggml costs a relative error of up to 2^-11. All arithmetic is float32, in the order
written.

Source: `quantize_row_*_ref` in ggml-quants.c of ggml; ggml-common.h for the layouts.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from array_api_compat import array_namespace, device

from kvref.array import Array, Shape
from kvref.formats import bounds
from kvref.formats.base import Granularity, Quantized, check_read_back, finite_rows, groups, in_groups
from kvref.formats.packing import pack, unpack
from kvref.formats.rounding import round_half_away
from kvref.formats.small_float import FLOAT16

GROUP = 32
LEAST_INVERTIBLE = 2.0**-127  # below it 1 / scale can overflow float32, and the codes of ggml are undefined behavior in C
# The number that each of the 16 codes of IQ4_NL stands for, before it is multiplied by the scale: denser near zero.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_EPSILON = 1e-15  # a block whose largest magnitude is below it is stored as zeros


@dataclass(frozen=True)
class GGML:
    """A cache type of ggml with evenly spaced codes.

    The bytes of a block are: the scale in float16; in affine types the least value in float16; in 5-bit types the fifth bits of
    the codes, 4 bytes; then the codes, as bytes or as nibbles.
    """

    name: str
    bits: int
    granularity: Granularity = "group"
    group: int = GROUP
    scale_arrays: int = 0  # scales are stored among the codes
    affine: bool = False

    @property
    def element(self) -> str:
        return f"{'int' if self.bits == 8 else 'uint'}{self.bits}"

    def code_width(self, width: int) -> int:
        halves = 2 if self.affine else 1
        return groups(self.name, width, GROUP) * (2 * halves + GROUP * self.bits // 8)

    def code_dtype(self, xp: object) -> str:
        return "uint8"

    def scale_shape(self, width: int) -> Shape:
        return ()

    def scale_dtype(self, xp: object) -> str:
        return "float16"

    def quantize(self, rows: Array) -> Quantized:
        """Quantize rows [..., width].

        Raises as `Format.quantize` does, NonFinite also if a scale or a least value overflows float16.
        """
        x = in_groups(self.name, finite_rows(rows), GROUP)
        xp = array_namespace(x)
        with np.errstate(over="ignore", invalid="ignore"):  # check_read_back detects the overflow
            codes, *halves = self._coded(x)
        halves = [xp.astype(FLOAT16.encode(each), xp.int32) for each in halves]
        for each in halves:
            check_read_back(self.name, FLOAT16.decode(each))
        head = xp.stack([xp.astype(byte, xp.uint8) for each in halves for byte in (each & 255, each >> 8)], axis=-1)
        block = xp.concat([head, *self._packed(codes)], axis=-1)
        return Quantized(xp.reshape(block, (*rows.shape[:-1], self.code_width(rows.shape[-1]))))

    def dequantize(self, stored: Quantized, width: int) -> Array:
        codes, scale, least = self._numbers(stored, width)
        values = self._worth(codes) * scale  # exact: 8 bits times 11 bits
        values = values if least is None else values + least
        return array_namespace(values).reshape(values, (*stored.codes.shape[:-1], width))

    def bound(self, rows: Array, stored: Quantized) -> Array:
        x = in_groups(self.name, rows, GROUP)
        codes, scale, least = self._numbers(stored, rows.shape[-1])
        return array_namespace(x).reshape(self._bound(x, self._worth(codes), scale, least), rows.shape)

    def _bound(self, x: Array, worth: Array, scale: Array, least: Array | None) -> Array:
        """`bound` of blocks x [..., blocks, 32]. worth: the number of each code."""
        if least is not None:
            return bounds.ggml_affine_bound(x, worth, scale, least, 2**self.bits - 1)
        zero = 2 ** (self.bits - 1)
        return bounds.ggml_bound(x, worth, scale, *((127, 127) if self.bits == 8 else (-zero, zero - 1)))

    def _coded(self, x: Array) -> tuple[Array, ...]:
        """uint8 codes [..., blocks, 32], and float32 [..., blocks]: the scale, and the least value where affine."""
        xp = array_namespace(x)
        if self.affine:
            least = xp.take_along_axis(x, xp.argmin(x, axis=-1, keepdims=True), axis=-1)[..., 0]  # of 0.0 and -0.0 the first one
            scale = _over(xp.max(x, axis=-1) - least + 0.0, 2**self.bits - 1)  # + 0.0: a range of -0.0 becomes 0.0
            quotient = (x - least[..., None]) * _inverse(scale)[..., None]
            return _truncated(quotient + 0.5, self.bits), scale, least
        if self.bits == 8:
            scale = _over(xp.max(xp.abs(x), axis=-1), 127)
            codes = xp.astype(round_half_away(x * _inverse(scale)[..., None]), xp.int16)
            return xp.astype(codes & 255, xp.uint8), scale
        zero = 2 ** (self.bits - 1)
        scale = _over(_of_largest_magnitude(x), -zero)  # so that the largest magnitude gets code 0: -zero, without +zero
        return _truncated(x * _inverse(scale)[..., None] + (zero + 0.5), self.bits), scale

    def _worth(self, codes: Array) -> Array:
        """The numbers that codes stand for, before they are multiplied by the scale: float32."""
        xp = array_namespace(codes)
        if self.affine:
            return xp.astype(codes, xp.float32)
        code = xp.astype(codes, xp.float32)
        return xp.where(code > 127, code - 256.0, code) if self.bits == 8 else code - 2.0 ** (self.bits - 1)

    def _packed(self, codes: Array) -> list[Array]:
        """The bytes of a block after its scale: the fifth bits in order, then bytes with code i (low) and code i + 16 (high)."""
        if self.bits == 8:
            return [codes]
        low, high = codes[..., : GROUP // 2] & 15, codes[..., GROUP // 2 :] & 15
        return [*([pack(codes >> 4, 1)] if self.bits == 5 else []), low | (high << 4)]

    def _numbers(self, stored: Quantized, width: int) -> tuple[Array, Array, Array | None]:
        """The stored codes, uint8 [..., blocks, 32], scales and least values, float32 [..., blocks, 1]."""
        xp = array_namespace(stored.codes)
        blocks = groups(self.name, width, GROUP)
        block = xp.reshape(stored.codes, (*stored.codes.shape[:-1], blocks, self.code_width(GROUP)))
        scale = _half(block[..., :2])
        least, body = (_half(block[..., 2:4]), block[..., 4:]) if self.affine else (None, block[..., 2:])
        if self.bits == 8:
            return body, scale, least
        nibbles = body[..., -GROUP // 2 :]
        codes = xp.concat([nibbles & 15, nibbles >> 4], axis=-1)
        if self.bits == 5:
            codes = codes | (unpack(body[..., :4], 1, GROUP) << 4)
        return codes, scale, least


class IQ4NL(GGML):
    """IQ4_NL: a code is an index into IQ4_VALUES, which are not evenly spaced.

    After the codes are chosen, the scale is fitted by least squares, weighted by x^2 (FMT-GGML-05).
    """

    @property
    def element(self) -> str:
        return "table of 16"

    def _coded(self, x: Array) -> tuple[Array, ...]:
        xp = array_namespace(x)
        largest = _of_largest_magnitude(x)
        empty = xp.abs(largest) < IQ4_EPSILON
        first = _over(xp.where(empty, xp.ones_like(largest), largest), IQ4_VALUES[0])
        table = _table(x)
        quotient = x * (xp.ones_like(first) / first)[..., None]
        index = xp.zeros(x.shape, dtype=xp.int32, device=device(x))
        for below, above in pairwise(IQ4_VALUES):  # the nearest value, of two equally near ones the upper
            index = index + xp.astype(quotient - float(below) >= float(above) - quotient, xp.int32)
        worth = xp.reshape(xp.take(table, xp.reshape(xp.astype(index, xp.int64), (-1,)), axis=0), x.shape)
        weight = x * x
        products, squares = weight * worth * x, weight * worth * worth
        fitted = _sum_in_order(products) / xp.where(empty, xp.ones_like(largest), _sum_in_order(squares))
        return xp.astype(index, xp.uint8), xp.where(empty, xp.zeros_like(fitted), fitted)

    def _worth(self, codes: Array) -> Array:
        """The table's values for codes: float32."""
        xp = array_namespace(codes)
        return xp.reshape(xp.take(_table(codes), xp.reshape(xp.astype(codes, xp.int64), (-1,)), axis=0), codes.shape)

    def _bound(self, x: Array, worth: Array, scale: Array, least: Array | None) -> Array:
        widest = max(above - below for below, above in pairwise(IQ4_VALUES))
        least_inverted = IQ4_EPSILON / abs(IQ4_VALUES[0])
        return bounds.ggml_bound(x, worth, scale, IQ4_VALUES[0], IQ4_VALUES[-1], widest, least_inverted)


def _over(numerator: Array, divisor: float) -> Array:
    """numerator / divisor, with an array as the divisor: see kvref.formats.row_scales."""
    return numerator / array_namespace(numerator).full_like(numerator, divisor)


def _inverse(scale: Array) -> Array:
    """1 / scale, and 0 if |scale| is below LEAST_INVERTIBLE."""
    xp = array_namespace(scale)
    has_one = xp.abs(scale) >= LEAST_INVERTIBLE
    return xp.where(has_one, xp.ones_like(scale) / xp.where(has_one, scale, xp.ones_like(scale)), xp.zeros_like(scale))


def _truncated(quotient: Array, bits: int) -> Array:
    """Quotients rounded toward zero and clipped to [0, 2^bits), as uint8."""
    xp = array_namespace(quotient)
    return xp.astype(xp.clip(xp.trunc(quotient), 0.0, 2.0**bits - 1), xp.uint8)


def _of_largest_magnitude(x: Array) -> Array:
    """The number [...] of the largest magnitude in each block [..., 32], the first if there are several; 0.0 instead of -0.0."""
    xp = array_namespace(x)
    where = xp.argmax(xp.abs(x), axis=-1, keepdims=True)
    return xp.take_along_axis(x, where, axis=-1)[..., 0] + 0.0


def _sum_in_order(x: Array) -> Array:
    """The sum of each block [..., 32], added in order: in float32 the order affects the result."""
    total = x[..., 0]
    for i in range(1, GROUP):
        total = total + x[..., i]
    return total


def _half(pair: Array) -> Array:
    """The float16 in each pair of bytes [..., 2], low byte first: float32 [..., 1]."""
    xp = array_namespace(pair)
    code = xp.astype(pair, xp.int32)
    return FLOAT16.decode(code[..., :1] | (code[..., 1:] << 8))


def _table(like: Array) -> Array:
    """IQ4_VALUES as a float32 array, in the library and on the device of `like`."""
    xp = array_namespace(like)
    return xp.asarray([float(value) for value in IQ4_VALUES], dtype=xp.float32, device=device(like))


GGML_TYPES: tuple[GGML, ...] = (
    GGML("q8_0", 8),
    GGML("q4_0", 4),
    GGML("q4_1", 4, affine=True),
    GGML("q5_0", 5),
    GGML("q5_1", 5, affine=True),
    IQ4NL("iq4_nl", 4),
)
