"""The family `elements`: encoding and decoding of single values."""

from typing import Protocol

import numpy as np

from kvref_conformance.families import Family
from kvref_conformance.implementation_api import Codes, Numbers
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="elements",
    chapter="formats",
    encodes=True,
)


# The typed protocol of encoding and decoding.

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "encode": "ShapeMismatch DtypeMismatch",
}


class Elements(Protocol):
    """Single values, without a scale. Codes have any dtype that `decode` accepts; FP8 codes are uint8."""

    def encode(self, values: Numbers, format: str) -> Codes: ...
    def decode(self, codes: Codes, format: str) -> Numbers: ...


class ElementsFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self) -> Elements: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    return {
        **on_family("elements", {
            "encode": args(values=counting_rows(sizes.dim), format=sizes.format),
            "decode": args(codes=np.zeros(sizes.dim, np.uint8), format=sizes.format)
        }),
    }  # fmt: skip
