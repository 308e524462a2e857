"""The reference model of encoding and decoding."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle import elements
from kvref_conformance.oracle.expected import (
    CODED,
    Arrays,
    Expected,
    exactly,
    float32,
    wrong_arrays,
)  # fmt: skip
from kvref_conformance.oracle.model import Function


class Elements(Function):
    family = "elements"

    def encode(self, values: NDArray, format: str) -> Expected:
        if wrong_arrays((values, (None,))):
            raise ValueError("values: expected another shape or dtype")
        x = float32(values)
        if format in CODED:  # codes have any dtype that decode accepts
            return Arrays("FMT-CAST-01", parts=(exactly(elements.round_to(x, format)),), codes_of=format)
        codes = elements.encode(x, format)
        nan = np.isnan(elements.decoded(format)[codes])  # NaN has several codes; each is right
        return Arrays("FMT-FP8-02", parts=(exactly(codes),), unsure=nan if nan.any() else None)

    def decode(self, codes: NDArray, format: str) -> Expected:
        if format in CODED and codes.dtype.kind not in "iu":
            return Arrays("FMT-CAST-01", parts=(exactly(float32(codes)),))
        values = elements.decoded(format)[codes.astype(np.int64)]
        return Arrays("FMT-CAST-01" if format in CODED else "FMT-FP8-01", parts=(exactly(values),))
