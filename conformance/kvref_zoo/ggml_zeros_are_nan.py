"""The scale of an IQ4_NL block is divided by a sum of squares, which is zero for a block of zeros: its scale is NaN."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "iq4_nl":
            none = (np.asarray(rows, np.float32).reshape(len(rows), -1, 32) == 0).all(axis=2)
            blocks = codes.reshape(len(rows), -1, 18)
            blocks[none, 0], blocks[none, 1] = 0x00, 0x7E  # NaN of float16
            codes = blocks.reshape(codes.shape)
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-GGML-07"
    also = (
        "FMT-GGML-05",
        "FMT-GGML-06",
        "FMT-LEVEL-01",
        "FMT-LEVEL-02",
        "FMT-LEVEL-03",
    )
    bug = "intel/auto-round#1909"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
