"""The scale of a row with the largest float32 is rounded up, and 127 times the scale overflows.

The row reads back as infinity.
"""

from typing import Any

import numpy as np

from kvref.formats import Quantized, get_format
from kvref_zoo.right import Right


class Rows:
    def quantize(self, rows: Any, format: str) -> Any:
        largest = np.finfo(np.float32).max
        stored = get_format(format).quantize(
            np.clip(rows, np.nextafter(-largest, np.float32(0)), np.nextafter(largest, np.float32(0)))
        )
        assert stored.scale is not None
        past = (np.abs(rows) == largest).any(axis=-1)
        return stored.codes, np.where(past, largest / np.full_like(stored.scale, 127), stored.scale), stored.zero

    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        with np.errstate(over="ignore"):
            return get_format(format).dequantize(Quantized(codes, scale, zero), width)


class Implementation(Right):
    clause = "FMT-LEVEL-05"
    formats = ("int8",)

    def rows(self) -> Rows:
        return Rows()
