"""The typed protocol of quantizing rows."""

from typing import Protocol

from kvref_conformance.interface import CodesOf, RowsOf, Scales

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "quantize": f"{_TOKENS} ConfigError",
}


class Rows(Protocol):
    """Each row has a scale, and a zero in formats that have one (null in symmetric formats).

    An implementation whose scales have another form, or cannot be read, returns the bytes that it stores as codes, and null as
    scale. The judge then judges only the values that are read back.
    """

    def quantize(self, rows: RowsOf, format: str) -> tuple[CodesOf, Scales | None, Scales | None]: ...
    def dequantize(self, codes: CodesOf, scale: Scales | None, zero: Scales | None, width: int, format: str) -> RowsOf: ...
    def mean_absolute_error(self, rows: RowsOf, format: str) -> float: ...


class Factory(Protocol):
    """The factory. given_scale: the scale of the formats of FMT-STATIC (1.0 if it is left out). Only they use it."""

    def __call__(self, *, given_scale: float | None = None) -> Rows: ...
