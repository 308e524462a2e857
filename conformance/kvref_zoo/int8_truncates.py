"""The cast to int8 truncates towards zero: every number loses up to a whole step."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        codes, scale, zero = super().quantize(rows, format)
        if format == "int8":
            codes = np.clip(np.trunc(rows.astype(np.float32) / np.asarray(scale)[:, None]), -127, 127).astype(np.int8)
        return codes, scale, zero


class Implementation(Right):
    clause = "FMT-INT8-02"
    also = ("FMT-INT8-06", "FMT-INT8-08", "FMT-INT8-09", "FMT-LEVEL-01", "FMT-LEVEL-02", "FMT-LEVEL-03")
    bug = "vllm-project/vllm#45361"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
