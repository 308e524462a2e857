"""The largest element of a row can exceed 57344 by one ulp after the division by the scale.

It is not clipped and becomes infinity.
"""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "float8_e5m2":
            codes = np.where(np.abs(rows.astype(np.float32) / np.asarray(scale)[:, None]) > 57344, np.uint8(0x7C), codes)
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-FP8-08"
    also = ("FMT-FP8-09", "FMT-FP8-10", "FMT-LEVEL-01", "FMT-LEVEL-02", "FMT-LEVEL-03", "FMT-LEVEL-05")

    def rows(self) -> Rows:
        return Rows(kvref.reference)
