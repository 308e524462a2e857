"""Rows are padded with zeros, and the padding is included in the minimum and maximum of the row."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        width = rows.shape[-1]
        if format != "q4" or width & (width - 1) == 0:
            return super().quantize(rows, format)
        padded = np.concatenate([rows, np.zeros((len(rows), 1), rows.dtype)], axis=-1)
        codes, scale, zero = super().quantize(padded, format)
        return codes[:, : -(-width // 2)], scale, zero


class Implementation(Right):
    clause = "FMT-AFF-08"
    also = ("FMT-AFF-01", "FMT-AFF-02", "FMT-AFF-05", "FMT-AFF-07", "FMT-LEVEL-01", "FMT-LEVEL-02", "FMT-LEVEL-03")
    bug = "InternLM/lmdeploy#4849"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
