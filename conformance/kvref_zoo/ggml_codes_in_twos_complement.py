"""Codes of Q4_0 are written in two's complement. The format stores each code plus 8."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "q4_0":
            blocks = np.array(codes).reshape(len(codes), -1, 18)
            blocks[:, :, 2:] ^= 0x88
            codes = blocks.reshape(np.shape(codes))
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-GGML-03"
    also = ("FMT-GGML-06", "FMT-LEVEL-01", "FMT-LEVEL-02", "FMT-LEVEL-03")
    bug = "1bit-MONSTER/1bit-MONSTER#572"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
