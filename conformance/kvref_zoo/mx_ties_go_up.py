"""A number halfway between two E2M1 elements is rounded away from zero instead of to the even code."""

from typing import Any

import numpy as np

import kvref
from kvref.formats.packing import pack, unpack
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right

TIES = (0.25, 1.25, 2.5, 5.0)  # midpoints whose upper element has the odd code


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format != "mxfp4":
            return codes, scale, zero
        power = np.repeat(np.asarray(scale).astype(np.int32) - 127, 32, axis=1)
        tie = np.isin(np.ldexp(np.abs(np.asarray(rows, np.float64)), -power), TIES)
        return pack(unpack(codes, 4, tie.shape[1]) + tie.astype(np.uint8), 4), scale, zero


class Implementation(Right):
    clause = "FMT-MX-03"
    also = ("FMT-LEVEL-01",)
    bug = "ROCm/aiter#3992"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
