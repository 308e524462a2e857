"""The family `rows`: quantizing rows of numbers, and reading them back."""

from math import isfinite
from typing import Protocol

from kvref_conformance.families import Family
from kvref_conformance.implementation_api import CodesOf, RowsOf, Scales
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="rows",
    chapter="formats",
    fits=lambda config: config.get("given_scale") is None or (isfinite(config["given_scale"]) and config["given_scale"] > 0),
    encodes=True,
)


# The typed protocol of quantizing rows.

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


class RowsFactory(Protocol):
    """The factory. given_scale: the scale of the formats of FMT-STATIC (1.0 if it is left out). Only they use it."""

    def __call__(self, *, given_scale: float | None = None) -> Rows: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    return {
        **on_family("rows", {
            "quantize": args(rows=counting_rows(2, sizes.dim), format=sizes.format),
            "dequantize": args(
                codes=lambda got: got["rows.quantize"][0], scale=lambda got: got["rows.quantize"][1],
                zero=lambda got: got["rows.quantize"][2], width=sizes.dim, format=sizes.format,
            ),
            "mean_absolute_error": args(rows=counting_rows(2, sizes.dim), format=sizes.format),
        }),
    }  # fmt: skip
