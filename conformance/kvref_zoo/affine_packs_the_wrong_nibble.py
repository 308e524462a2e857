"""Codes with an even index are packed into the high nibble of a byte, but read from the low nibble."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        return (((codes << 4) | (codes >> 4)).astype(np.uint8) if format == "q4" else codes), scale, zero


class Implementation(Right):
    clause = "FMT-AFF-06"
    also = ("FMT-AFF-02", "FMT-AFF-07", "FMT-LEVEL-01", "FMT-LEVEL-02", "FMT-LEVEL-03")
    bug = "vllm-project/vllm#53086"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
