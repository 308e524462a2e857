"""The two nibbles of a byte of Q4_0 are read as adjacent values. In the format they are 16 values apart."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        values = super().dequantize(codes, scale, zero, width, format)
        if format != "q4_0":
            return values
        low_and_high = np.asarray(values).reshape(len(values), -1, 2, 16)
        return low_and_high.swapaxes(2, 3).reshape(values.shape)


class Implementation(Right):
    clause = "FMT-GGML-01"
    also = ("FMT-GGML-06", "FMT-LEVEL-01", "FMT-LEVEL-03")
    bug = "kekzl/imp#722"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
