"""The largest value of a group is scaled to 1 instead of the end of the element's range: small values are lost."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        if format != "mxfp8_e4m3":
            return super().quantize(rows, format)
        super().quantize(rows, format)  # raises if the rows must be rejected
        largest = np.abs(np.asarray(rows, np.float32)).reshape(len(rows), -1, 32).max(axis=2, keepdims=True)
        exponent = np.maximum(np.frexp(largest)[1] - 1, -127)
        groups = np.ldexp(np.asarray(rows, np.float32).reshape(len(rows), -1, 32), -exponent)
        codes = kvref.formats.element_format("float8_e4m3fn").encode(groups.astype(np.float32))
        return codes.reshape(len(rows), -1), (exponent[:, :, 0] + 127).astype(np.uint8), None


class Implementation(Right):
    clause = "FMT-MX-02"
    also = (
        "FMT-LEVEL-01",
        "FMT-LEVEL-02",
        "FMT-LEVEL-03",
        "FMT-LEVEL-05",
        "FMT-MX-03",
        "FMT-MX-04",
        "FMT-MX-05",
    )
    bug = "vllm-project/vllm#53110"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
