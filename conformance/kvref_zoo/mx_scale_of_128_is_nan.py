"""The check for NaN looks at the decoded scale instead of its code.

A scale of 128 becomes NaN, and the code of NaN becomes a number.
"""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        values = super().dequantize(codes, scale, zero, width, format)
        if not format.startswith("mx"):
            return values
        worth = np.repeat(np.asarray(scale), 32, axis=1)
        one = super().dequantize(codes, np.where(np.asarray(scale) == 255, np.uint8(254), scale), zero, width, format)
        with np.errstate(over="ignore"):
            beyond = np.where(one == 0, one, one * np.float32(2.0))
        return np.where(worth == 134, np.float32("nan"), np.where(worth == 255, beyond, values))


class Implementation(Right):
    clause = "FMT-MX-01"
    also = (
        "FMT-LEVEL-01",
        "FMT-LEVEL-03",
        "FMT-MX-05",
    )
    bug = "sgl-project/sglang#25519"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
