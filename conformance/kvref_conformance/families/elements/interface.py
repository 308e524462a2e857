"""The typed protocol of encoding and decoding."""

from typing import Protocol

from kvref_conformance.interface import Codes, Numbers

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "encode": "ShapeMismatch DtypeMismatch",
}


class Elements(Protocol):
    """Single values, without a scale. Codes have any dtype that `decode` accepts; FP8 codes are uint8."""

    def encode(self, values: Numbers, format: str) -> Codes: ...
    def decode(self, codes: Codes, format: str) -> Numbers: ...


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self) -> Elements: ...
