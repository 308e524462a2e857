"""The scale is cast to E4M3 without a clip: a scale beyond 448 becomes NaN."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "nvfp4" and scale is not None:
            largest = np.abs(np.asarray(rows, np.float32)).reshape(len(rows), -1, 16).max(axis=2)
            scale = np.where(largest / np.float32(6) >= 464, np.uint8(0x7F), scale)
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-MX-06"
    also = (
        "FMT-LEVEL-01",
        "FMT-LEVEL-02",
        "FMT-LEVEL-03",
        "FMT-LEVEL-05",
        "FMT-MX-05",
    )
    bug = "NVIDIA/Model-Optimizer#1397"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
