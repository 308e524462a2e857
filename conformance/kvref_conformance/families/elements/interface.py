"""Single values in a format, without a scale."""

from typing import Protocol

from kvref_conformance.interface import Codes, Numbers

# The errors that each operation may have to answer with; what `new` has to refuse is always a ConfigError.
ERRORS: dict[str, str] = {
    "encode": "ShapeMismatch DtypeMismatch",
}


class Elements(Protocol):
    """Single values, without a scale. Codes have any dtype that `decode` accepts; FP8 codes are uint8."""

    def encode(self, values: Numbers, format: str) -> Codes: ...
    def decode(self, codes: Codes, format: str) -> Numbers: ...


class Factory(Protocol):
    """What makes one: it is given every size by name."""

    def __call__(self) -> Elements: ...
