"""Codes are rounded with floor(x + 0.5), which rounds -1.5 to -1 and 1.5 to 2."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "int8":
            codes = np.clip(np.floor(rows.astype(np.float32) / np.asarray(scale)[:, None] + 0.5), -127, 127).astype(np.int8)
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-INT8-02"
    also = ("FMT-INT8-05", "FMT-INT8-09", "FMT-LEVEL-01", "FMT-LEVEL-03")
    bug = "weicj/vLLM-2080Ti-Definitive#109"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
