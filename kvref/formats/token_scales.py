"""Formats with one scale and one zero per token: q8 and q4 (FMT-AFF).

Here a row is the numbers of one token over all heads, separately for keys and for values (FMT-AFF-03). The zero is the least
number of the row, and the scale distributes the 2^bits codes over the range of the row.
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
    """value = code * scale + zero, where zero = min x and scale = (max x - min x) / (2^bits - 1), at least 1e-8."""

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
        """Quantize rows [..., width].

        Raises as `Format.quantize` does, ShapeMismatch also for a width of 0, and NonFinite also if max - min, or what max reads
        back as, overflows float32.
        """
        rows = finite_rows(rows)
        xp = array_namespace(rows)
        if rows.shape[-1] == 0:
            raise ShapeMismatch(f"{self.name} rows: expected at least one value per row, got shape {list(rows.shape)}")
        zero = xp.min(rows, axis=-1)
        with np.errstate(over="ignore"):  # check_read_back detects the overflow; NumPy would also warn
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
        product = self._codes(stored, width) * stored.scale[..., None]  # the first rounding
        return product + stored.zero[..., None]  # and the second: never a fused multiply-add (FMT-AFF-04)

    def bound(self, rows: Array, stored: Quantized) -> Array:
        assert stored.scale is not None and stored.zero is not None
        codes = self._codes(stored, rows.shape[-1])
        return bounds.affine_bound(rows, codes, stored.scale[..., None], stored.zero[..., None])

    def _codes(self, stored: Quantized, width: int) -> Array:
        xp = array_namespace(stored.codes)
        return xp.astype(unpack(stored.codes, self.bits, width), xp.float32)


q8 = AffineRow("q8", 8)
q4 = AffineRow("q4", 4)
