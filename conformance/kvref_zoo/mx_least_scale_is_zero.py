"""The code of a scale is shifted into the exponent of a float32. Code 0, which means 2^-127, becomes 0."""

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
        return np.where(np.repeat(np.asarray(scale), 32, axis=1) == 0, np.float32(0), values)


class Implementation(Right):
    clause = "FMT-MX-01"
    also = (
        "FMT-LEVEL-01",
        "FMT-LEVEL-03",
        "FMT-MX-04",
        "FMT-MX-05",
    )
    bug = "NVIDIA/TransformerEngine#3262"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
