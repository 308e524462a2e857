"""The reference model of encoding and decoding."""

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (  # fmt: skip
    CODED_DTYPES,
    Expectation,
    ExpectedArrays,
    array_errors,
    exact_reads,
    to_float32,
)
from kvref_conformance.oracle.formats import small_floats
from kvref_conformance.oracle.reference_model import FunctionModel


class Elements(FunctionModel):
    family = "elements"

    def encode(self, values: NDArray, format: str) -> Expectation:
        if array_errors((values, (None,))):
            raise ValueError("values: expected another shape or dtype")
        x = to_float32(values)
        if format in CODED_DTYPES:  # codes have any dtype that decode accepts
            return ExpectedArrays("FMT-CAST-01", parts=(exact_reads(small_floats.round_to(x, format)),), codes_of=format)
        codes = small_floats.encode(x, format)
        nan = np.isnan(small_floats.decoded(format)[codes])  # NaN has several codes; each is right
        return ExpectedArrays("FMT-FP8-02", parts=(exact_reads(codes),), undetermined=nan if nan.any() else None)

    def decode(self, codes: NDArray, format: str) -> Expectation:
        if format in CODED_DTYPES and codes.dtype.kind not in "iu":
            return ExpectedArrays("FMT-CAST-01", parts=(exact_reads(to_float32(codes)),))
        values = small_floats.decoded(format)[codes.astype(np.int64)]
        return ExpectedArrays("FMT-CAST-01" if format in CODED_DTYPES else "FMT-FP8-01", parts=(exact_reads(values),))
