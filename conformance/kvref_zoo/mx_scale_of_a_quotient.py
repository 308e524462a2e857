"""The scale is the exponent of max|x| / 6 instead of the exponent of max|x| minus the exponent of 6.

It is sometimes one lower.
"""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right

SIX = np.float32(6.0)


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format != "mxfp4" or scale is None:
            return codes, scale, zero
        largest = np.abs(np.asarray(rows, np.float32)).reshape(len(rows), -1, 32).max(axis=2)
        exponent = (largest / SIX).view(np.int32) >> 23
        step = (scale.astype(np.int32) - exponent).clip(0, 1)  # 1 where the exponent of the quotient is one lower, else 0
        smaller = np.asarray(rows, np.float32) * (2.0 ** np.repeat(step, 32, axis=1)).astype(np.float32)
        largest_scales = np.float32(2.0) ** (scale.astype(np.float32) - 127)
        most = 6 * np.repeat(largest_scales, 32, axis=1)
        codes, _, _ = super().quantize(np.clip(smaller, -most, most), format)
        return codes, np.maximum(scale.astype(np.int32) - step, 0).astype(np.uint8), zero


class Implementation(Right):
    clause = "FMT-MX-02"
    also = (
        "FMT-LEVEL-01",
        "FMT-LEVEL-02",
        "FMT-LEVEL-03",
        "FMT-MX-03",
        "FMT-MX-05",
    )
    bug = "vllm-project/vllm#43557"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
