"""Affine rows: a scale and a zero point for each row. Q8 and Q4.

The zero point is the row's least value and the scale spreads the 2^bits codes over the row's range. Keys and values are rows
of their own, each with its own scale and zero (FMT-AFF-03).
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array
from kvref.errors import ShapeMismatch
from kvref.formats import bounds
from kvref.formats.base import Granularity, OneScale, Quantized, check_read_back, finite_rows
from kvref.formats.packing import pack, unpack
from kvref.formats.rounding import round_half_away

LEAST_SCALE = 1e-8


@dataclass(frozen=True)
class AffineRow(OneScale):
    """value = code * scale + zero, with zero = min x and scale = (max x - min x) / (2^bits - 1), at least 1e-8."""

    name: str
    bits: int
    granularity: Granularity = "token"
    scale_arrays: int = 2

    @property
    def element(self) -> str:
        return f"uint{self.bits}"

    def code_width(self, width: int) -> int:
        return -(-width * self.bits // 8)

    def code_dtype(self, xp: object) -> str:
        return "uint8"

    def quantize(self, rows: Array) -> Quantized:
        """Also raises NonFinite where max - min, or what max reads back as, overflows float32."""
        rows = finite_rows(rows)
        xp = array_namespace(rows)
        if rows.shape[-1] == 0:
            raise ShapeMismatch(f"{self.name} rows: expected at least one value a row, got {list(rows.shape)}")
        zero = xp.min(rows, axis=-1)
        with np.errstate(over="ignore"):  # NumPy warns of the overflow that is looked for
            spread = xp.max(rows, axis=-1) - zero
            steps = xp.full_like(spread, 2**self.bits - 1)
            scale = xp.maximum(spread / steps, xp.full_like(spread, LEAST_SCALE))
            check_read_back(self.name, scale * steps + zero)
        quotient = (rows - zero[..., None]) / xp.broadcast_to(scale[..., None], rows.shape)
        codes = xp.clip(round_half_away(quotient), 0.0, 2.0**self.bits - 1)
        codes = xp.astype(codes, xp.uint8)
        return Quantized(pack(codes, self.bits), scale, zero)

    def dequantize(self, stored: Quantized, width: int) -> Array:
        assert stored.scale is not None and stored.zero is not None
        product = self._codes(stored, width) * stored.scale[..., None]  # rounds once here,
        return product + stored.zero[..., None]  # and once here: two roundings, never fused (FMT-AFF-04)

    def bound(self, rows: Array, stored: Quantized) -> Array:
        assert stored.scale is not None and stored.zero is not None
        codes = self._codes(stored, rows.shape[-1])
        return bounds.affine_bound(rows, codes, stored.scale[..., None], stored.zero[..., None])

    def _codes(self, stored: Quantized, width: int) -> Array:
        xp = array_namespace(stored.codes)
        return xp.astype(unpack(stored.codes, self.bits, width), xp.float32)


q8 = AffineRow("q8", 8)
q4 = AffineRow("q4", 4)
