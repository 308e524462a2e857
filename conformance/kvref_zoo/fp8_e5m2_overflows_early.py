"""Every number above 57344, the largest E5M2 number, becomes infinity, also a number that rounds to 57344."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Elements as RightElements
from kvref_zoo.right import Right


class Elements(RightElements):
    def encode(self, values: Any, format: str) -> Any:
        codes = super().encode(values, format)
        if format == "float8_e5m2":
            infinity = np.where(values > 0, 0x7C, 0xFC).astype(np.uint8)
            codes = np.where(np.abs(values) > 57344, infinity, codes)
        return codes


class Implementation(Right):
    clause = "FMT-FP8-04"

    def elements(self) -> Elements:
        return Elements(kvref.reference)
