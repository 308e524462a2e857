"""Subtracts 8 from four codes at once, as one 32-bit integer: a negative code borrows from the next code."""

from typing import Any

import numpy as np

import kvref
from kvref.formats.packing import pack
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right

EIGHTS = np.uint32(0x08080808)


class Rows(RightRows):
    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        if not format.startswith("int4"):
            return super().dequantize(codes, scale, zero, width, format)
        of_ones = super().dequantize(pack(np.ones((len(codes), width), np.uint8), 4), scale, zero, width, format)
        words = np.ascontiguousarray(codes).view("<u4")
        nibbles = [(words >> shift) & np.uint32(0x0F0F0F0F) for shift in (0, 4)]
        decoded = [((each ^ EIGHTS) - EIGHTS).view(np.int8) for each in nibbles]
        return np.stack(decoded, axis=2).reshape(len(codes), width).astype(np.float32) * of_ones


class Implementation(Right):
    clause = "FMT-GROUP-04"
    also = ("FMT-GROUP-05", "FMT-LEVEL-01", "FMT-LEVEL-03", "FMT-SMALL-01")
    bug = "gittensor-ai-lab/sparkinfer#761"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
