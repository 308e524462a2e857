"""The scale is computed by a multiplication with 1 / 127, as GPUs do to divide by a scalar: some scales are off by one ulp."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "int8" and rows.shape[0]:
            scale = np.maximum(np.abs(rows).max(axis=-1) * np.float32(1 / 127), np.float32(2.0**-23)).astype(np.float32)
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-INT8-01"
    also = ("FMT-INT8-08", "FMT-LEVEL-01")
    bug = "pytorch/pytorch#191495"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
