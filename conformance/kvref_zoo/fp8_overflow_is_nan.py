"""A number that is too large for E4M3FN becomes NaN instead of the largest number, 448."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Elements as RightElements
from kvref_zoo.right import Right


class Elements(RightElements):
    def encode(self, values: Any, format: str) -> Any:
        codes = super().encode(values, format)
        if format == "float8_e4m3fn":
            codes = np.where(np.abs(values) > 464, np.uint8(0x7F), codes)
        return codes


class Implementation(Right):
    clause = "FMT-FP8-03"
    bug = "pytorch/pytorch#178817"

    def elements(self) -> Elements:
        return Elements(kvref.reference)
