"""Formats without scales: float32, float16 and bfloat16 (FMT-CAST).

The Array API standard has float32 only. If the library has float16 or bfloat16, codes have this dtype. Otherwise codes are uint16
arrays with the same bits. The values read back are bit-identical.
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array
from kvref.formats import bounds
from kvref.formats.base import Granularity, OneScale, Quantized, widen
from kvref.formats.small_float import BFLOAT16, FLOAT16, SmallFloat


@dataclass(frozen=True)
class Cast(OneScale):
    """value = the nearest number of the dtype, ties to even; beyond its range infinity (FMT-CAST-01)."""

    name: str
    bits: int
    small_float: SmallFloat | None  # None for float32, which is stored unchanged
    granularity: Granularity = "element"
    scale_arrays: int = 0

    @property
    def element(self) -> str:
        return self.name

    def code_width(self, width: int) -> int:
        return width

    def code_dtype(self, xp: object) -> str:
        return self.name if hasattr(xp, self.name) else f"uint{self.bits}"

    def quantize(self, rows: Array) -> Quantized:
        rows = widen(rows)
        xp = array_namespace(rows)
        if self.small_float is None:
            return Quantized(rows)
        if hasattr(xp, self.name):
            with np.errstate(over="ignore"):  # NumPy would warn of the overflow to infinity that FMT-CAST-01 requires
                return Quantized(xp.astype(rows, getattr(xp, self.name)))
        return Quantized(self.small_float.encode(rows))

    def dequantize(self, stored: Quantized, width: int) -> Array:
        xp = array_namespace(stored.codes)
        if self.small_float is None or not xp.isdtype(stored.codes.dtype, "unsigned integer"):
            return xp.astype(stored.codes, xp.float32, copy=False)
        return self.small_float.decode(stored.codes)

    def bound(self, rows: Array, stored: Quantized) -> Array:
        if self.small_float is None:
            return array_namespace(rows).zeros_like(rows, dtype=array_namespace(rows).float64)
        return bounds.cast_bound(rows, self.small_float)


float32 = Cast("float32", 32, None)
float16 = Cast("float16", 16, FLOAT16)
bfloat16 = Cast("bfloat16", 16, BFLOAT16)
