"""Numbers are rounded to float16 and then to FP8: a number just above a midpoint becomes the midpoint, and is rounded down."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Elements as RightElements
from kvref_zoo.right import Right


class Elements(RightElements):
    def encode(self, values: Any, format: str) -> Any:
        if format.startswith("float8"):
            values = values.astype(np.float16).astype(np.float32)
        return super().encode(values, format)


class Implementation(Right):
    clause = "FMT-FP8-02"
    also = ("FMT-FP8-03", "FMT-FP8-04")
    bug = "FlashML-org/FreeToken#103"

    def elements(self) -> Elements:
        return Elements(kvref.reference)
