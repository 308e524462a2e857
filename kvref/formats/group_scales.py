"""Formats with a scale, in affine formats also a zero, per group of 32, 64 or 128 numbers of a row (FMT-GROUP).

An outlier increases the error of its group only, not of its row. More scales need more memory, so that they can also be stored
in float16 or bfloat16. A scale is then rounded once, and codes are computed with the rounded scale.
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array
from kvref.formats import bounds
from kvref.formats.base import Granularity, Quantized, ScaleAGroup, check_read_back, finite_rows, in_groups
from kvref.formats.casts import Cast, bfloat16, float16, float32
from kvref.formats.packing import pack, unpack
from kvref.formats.rounding import round_half_away

# The least scale, so that a group of zeros has a divisor. Below the normal numbers of float16 a scale would have fewer digits.
LEAST = {float32.name: 2.0**-23, bfloat16.name: 2.0**-23, float16.name: 2.0**-14}


@dataclass(frozen=True)
class GroupFormat(ScaleAGroup):
    """value = code * scale + zero if `affine`, otherwise value = code * scale.

    Affine: codes are in `[0, 2^bits)`, zero = min x, scale = (max x - zero) / (2^bits - 1). Symmetric: codes are in two's
    complement, -top <= code <= top, where top = 2^(bits - 1) - 1 and scale = max|x| / top. `scale` is the format in which scales
    and zeros are stored: float32, float16 or bfloat16.
    """

    bits: int
    group: int
    affine: bool
    scale: Cast
    granularity: Granularity = "group"

    @property
    def name(self) -> str:
        return f"{self.element}_g{self.group}_{self.scale.name}"

    @property
    def element(self) -> str:
        return f"{'uint' if self.affine else 'int'}{self.bits}"

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits if self.affine else self.bits - 1)) - 1

    @property
    def scale_arrays(self) -> int:
        return 2 if self.affine else 1

    def scale_dtype(self, xp: object) -> str:
        return self.scale.code_dtype(xp)

    def quantize(self, rows: Array) -> Quantized:
        """Quantize rows [..., width].

        Raises as `Format.quantize` does, NonFinite also if a scale, a zero, or what the largest code reads back as, overflows.
        """
        x = in_groups(self.name, finite_rows(rows), self.group)
        xp = array_namespace(x)
        with np.errstate(over="ignore", invalid="ignore"):  # check_read_back detects the overflow
            zero = self._rounded(xp.min(x, axis=-1) + 0.0) if self.affine else xp.zeros_like(x[..., 0])
            reach = xp.max(x, axis=-1) - zero if self.affine else xp.max(xp.abs(x), axis=-1)
            top = xp.full_like(reach, self.top)
            scale = self._rounded(xp.maximum(reach / top, xp.full_like(reach, LEAST[self.scale.name])))
            check_read_back(self.name, scale * top + zero)
            quotient = (x - zero[..., None]) / xp.broadcast_to(scale[..., None], x.shape)
            codes = xp.clip(round_half_away(quotient), 0.0 if self.affine else -float(self.top), float(self.top))
        unsigned = xp.astype(xp.astype(codes, xp.int16) & (2**self.bits - 1), xp.uint8)
        codes = pack(xp.reshape(unsigned, rows.shape), self.bits)
        held, *of_zero = (self.scale.quantize(each).codes for each in ((scale, zero) if self.affine else (scale,)))
        return Quantized(codes, held, *of_zero)

    def dequantize(self, stored: Quantized, width: int) -> Array:
        codes, scale, zero = self._numbers(stored, width)
        xp = array_namespace(codes)
        values = codes * scale  # the first rounding
        return xp.reshape(values if zero is None else values + zero, (*stored.codes.shape[:-1], width))  # the second

    def bound(self, rows: Array, stored: Quantized) -> Array:
        codes, scale, zero = self._numbers(stored, rows.shape[-1])
        x = in_groups(self.name, rows, self.group)
        return array_namespace(x).reshape(bounds.group_bound(x, codes, scale, zero, self.top), rows.shape)

    def _rounded(self, values: Array) -> Array:
        """float32 numbers rounded to the dtype of scales, as float32."""
        return self.scale.dequantize(self.scale.quantize(values), 0)

    def _numbers(self, stored: Quantized, width: int) -> tuple[Array, Array, Array | None]:
        """The stored codes [..., groups, group], scales and zeros [..., groups, 1], all as float32."""
        xp = array_namespace(stored.codes)
        codes = xp.astype(unpack(stored.codes, self.bits, width), xp.float32)
        if not self.affine:
            codes = xp.where(codes > self.top, codes - 2.0**self.bits, codes)  # two's complement
        assert stored.scale is not None
        scale, *zero = (self.scale.dequantize(Quantized(each), 0)[..., None] for each in stored[1:] if each is not None)
        return in_groups(self.name, codes, self.group), scale, zero[0] if zero else None


GROUPS = tuple(
    GroupFormat(bits, group, affine, scale)
    for affine in (False, True)
    for bits in (8, 4, 2)
    for group in (32, 64, 128)
    for scale in (float32, float16, bfloat16)
)
