"""Formats of groups whose scales are 8-bit floats: the MX formats of the Open Compute Project, and NVFP4 (FMT-MX).

A number divided by the scale of its group is stored as an *element*: a small float, or an integer in mxint8. An MX scale is a
power of two, so that division by it is exact and only elements are rounded. Because the scale is rounded down to a power of two,
quotients can exceed the largest element, up to twice as large in magnitude; they are clipped.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.3; NVIDIA's description of NVFP4 for Blackwell.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device

from kvref.array import Array
from kvref.formats import bounds
from kvref.formats.base import Granularity, Quantized, ScaleAGroup, finite_rows, in_groups
from kvref.formats.packing import pack, unpack
from kvref.formats.small_float import E2M1, E2M3, E3M2, E4M3FN, E5M2, SmallFloat, times_power

E8M0_BIAS, E8M0_NAN = 127, 255


@dataclass(frozen=True)
class Int8Element:
    """The element of mxint8: 8-bit two's complement in steps of 2^-6. -128 is not used, so that the range is symmetric."""

    name: str = "int8"
    bits: int = 8
    max: float = 127 / 64

    def encode(self, x: Array) -> Array:
        xp = array_namespace(x)
        return xp.astype(xp.astype(xp.round(x * 64.0), xp.int16) & 255, xp.uint8)

    def decode(self, codes: Array) -> Array:
        xp = array_namespace(codes)
        code = xp.astype(codes, xp.float32)
        return xp.where(code > 127, code - 256.0, code) / 64.0


@dataclass(frozen=True)
class Microscaled(ScaleAGroup, ABC):
    """value = element * scale: base class of MX and NVFP4, which compute the scale differently. `small` is the element type."""

    name: str
    small: SmallFloat | Int8Element  # the type of elements
    group: int = 32
    granularity: Granularity = "group"
    scale_arrays: int = 1

    @property
    def bits(self) -> int:
        return self.small.bits

    @property
    def element(self) -> str:
        return self.small.name

    def scale_dtype(self, xp: object) -> str:
        return "uint8"

    def quantize(self, rows: Array) -> Quantized:
        x = in_groups(self.name, finite_rows(rows), self.group)
        xp = array_namespace(x)
        scale = self.scale_codes(xp.max(xp.abs(x), axis=-1))
        most = xp.full_like(x, self.small.max)
        elements = self.small.encode(xp.minimum(xp.maximum(self.divided(x, scale), -most), most))
        return Quantized(pack(xp.reshape(elements, rows.shape), self.bits), scale)

    def dequantize(self, stored: Quantized, width: int) -> Array:
        elements = in_groups(self.name, self.small.decode(unpack(stored.codes, self.bits, width)), self.group)
        with np.errstate(over="ignore", invalid="ignore"):  # NumPy would warn of scale codes that no quantizer stores
            values = self.multiplied(elements, stored.scale)
        return array_namespace(values).reshape(values, (*stored.codes.shape[:-1], width))

    def bound(self, rows: Array, stored: Quantized) -> Array:
        x, xp = in_groups(self.name, rows, self.group), array_namespace(rows)
        one = self.multiplied(xp.ones_like(x[..., :1]), stored.scale)
        if isinstance(self.small, Int8Element):
            return xp.reshape(bounds.int8_element_bound(x, one), rows.shape)
        return xp.reshape(bounds.small_element_bound(x, one, self.small), rows.shape)

    @abstractmethod
    def scale_codes(self, largest: Array) -> Array:
        """uint8 codes [..., groups] of the scales. largest: float32, the largest magnitude of each group."""

    @abstractmethod
    def divided(self, x: Array, scale: Array) -> Array:
        """x [..., groups, group] divided by the scales with the codes `scale` [..., groups]."""

    @abstractmethod
    def multiplied(self, elements: Array, scale: Array | None) -> Array:
        """elements [..., groups, group] times the scales with the codes `scale` [..., groups]."""


class MX(Microscaled):
    """scale = 2^(floor(log2 max|x|) - largest_exponent), at least 2^-127, stored as its exponent: E8M0 (FMT-MX-02)."""

    def scale_codes(self, largest: Array) -> Array:
        xp = array_namespace(largest)
        powers = xp.asarray([2.0**e for e in range(-126, 128)], dtype=xp.float32, device=device(largest))
        # The number of powers that are at most `largest` is its exponent plus 127, as in E8M0. Below 2^-126 it is 0, for 2^-127.
        exponent = xp.searchsorted(powers, xp.reshape(largest, (-1,)), side="right")
        code = xp.reshape(exponent, largest.shape) - self.largest_exponent
        return xp.astype(xp.clip(code, 0, E8M0_NAN - 1), xp.uint8)

    @property
    def largest_exponent(self) -> int:
        """floor(log2) of the largest element: 8 for E4M3FN, 2 for E2M1, 0 for INT8."""
        return int(self.small.max).bit_length() - 1

    def divided(self, x: Array, scale: Array) -> Array:
        return self._times_scale(x, scale, -1)

    def multiplied(self, elements: Array, scale: Array | None) -> Array:
        assert scale is not None
        values, xp = self._times_scale(elements, scale, 1), array_namespace(elements)
        return xp.where(scale[..., None] == E8M0_NAN, xp.full_like(values, float("nan")), values)

    @staticmethod
    def _times_scale(x: Array, scale: Array, sign: int) -> Array:
        xp = array_namespace(x)
        power = sign * (xp.astype(scale, xp.int32) - E8M0_BIAS)
        return times_power(x, xp.broadcast_to(power[..., None], x.shape))


class NVFP4(Microscaled):
    """scale = max|x| / 6, clipped to the normal numbers of E4M3FN, [2^-6, 448], and rounded to E4M3FN (FMT-MX-06)."""

    def scale_codes(self, largest: Array) -> Array:
        xp = array_namespace(largest)
        scale = largest / xp.full_like(largest, self.small.max)
        return E4M3FN.encode(xp.clip(scale, 2.0**-6, E4M3FN.max))

    def divided(self, x: Array, scale: Array) -> Array:
        return x / array_namespace(x).broadcast_to(E4M3FN.decode(scale)[..., None], x.shape)

    def multiplied(self, elements: Array, scale: Array | None) -> Array:
        assert scale is not None
        return elements * E4M3FN.decode(scale)[..., None]  # exact: the mantissas have 2 and 4 bits


MICROSCALED: tuple[Microscaled, ...] = (
    MX("mxfp8_e4m3", E4M3FN),
    MX("mxfp8_e5m2", E5M2),
    MX("mxfp6_e2m3", E2M3),
    MX("mxfp6_e3m2", E3M2),
    MX("mxfp4", E2M1),
    MX("mxint8", Int8Element()),
    NVFP4("nvfp4", E2M1, group=16),
)
