"""Reading masks the bits of a code out of its byte and does not extend the sign.

Negative codes are read as large positive ones.
"""

from typing import Any

import numpy as np

import kvref
from kvref.formats.packing import pack, unpack
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        if not format.startswith(("int2", "int4")):
            return super().dequantize(codes, scale, zero, width, format)
        bits = int(format[3])
        of_ones = super().dequantize(pack(np.ones((len(codes), width), np.uint8), bits), scale, zero, width, format)
        return unpack(np.asarray(codes), bits, width).astype(np.float32) * of_ones


class Implementation(Right):
    clause = "FMT-GROUP-04"
    also = ("FMT-GROUP-05", "FMT-LEVEL-01", "FMT-LEVEL-03", "FMT-SMALL-01")
    bug = "tile-ai/tilelang#2482"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
