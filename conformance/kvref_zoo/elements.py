"""Wrong casts of elements to FP8."""

from typing import Any

import numpy as np

from kvref_conformance.implementations.backends import Elements as RightElements
from kvref_zoo.mutant import mutant


@mutant("FMT-FP8-04")
class Fp8E5m2OverflowsEarly(RightElements):
    """Every number above 57344, the largest E5M2 number, becomes infinity, also a number that rounds to 57344."""

    def encode(self, values: Any, format: str) -> Any:
        codes = super().encode(values, format)
        if format == "float8_e5m2":
            infinity = np.where(values > 0, 0x7C, 0xFC).astype(np.uint8)
            codes = np.where(np.abs(values) > 57344, infinity, codes)
        return codes


@mutant("FMT-FP8-03", seen_in="pytorch/pytorch#178817")
class Fp8OverflowIsNan(RightElements):
    """A number that is too large for E4M3FN becomes NaN instead of the largest number, 448."""

    def encode(self, values: Any, format: str) -> Any:
        codes = super().encode(values, format)
        if format == "float8_e4m3fn":
            codes = np.where(np.abs(values) > 464, np.uint8(0x7F), codes)
        return codes


@mutant("FMT-FP8-02", also="FMT-FP8-03 FMT-FP8-04", seen_in="FlashML-org/FreeToken#103")
class Fp8RoundsTwice(RightElements):
    """Numbers are rounded to float16 and then to FP8.

    A number just above a midpoint becomes the midpoint, and is rounded down.
    """

    def encode(self, values: Any, format: str) -> Any:
        if format.startswith("float8"):
            values = values.astype(np.float16).astype(np.float32)
        return super().encode(values, format)
