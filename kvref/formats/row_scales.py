"""Formats with one scale per row and no zero: INT8, FP8 E4M3FN and FP8 E5M2 (FMT-INT8, FMT-FP8).

The scale maps the largest magnitude m of the row to the largest code `limit`: it is m / limit, and at least LEAST_SCALE, so that
a row of zeros has a divisor. The order of the operations determines the bits, and is specified in FMT-INT8-01 to FMT-INT8-03 and
FMT-FP8-08.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array
from kvref.formats import bounds
from kvref.formats.base import Granularity, OneScale, Quantized, check_read_back, finite_rows
from kvref.formats.rounding import round_half_away
from kvref.formats.small_float import E4M3FN, E5M2, SmallFloat

LEAST_SCALE = 2.0**-23  # the machine epsilon of float32


@dataclass(frozen=True)
class SymmetricRow(OneScale):
    """value = decode(code) * scale, where scale = max|x| / limit and code = encode(x / scale).

    `limit` is the largest code's number, `dtype` the dtype of codes, and `worst_error(rows, decoded, scale)` the error bound.
    """

    name: str
    limit: float
    dtype: str
    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]
    worst_error: Callable[[Array, Array, Array], Array]  # of rows, decoded codes and scales
    bits: int = 8
    granularity: Granularity = "head"
    scale_arrays: int = 1

    @property
    def element(self) -> str:
        return self.name

    def code_width(self, width: int) -> int:
        return width

    def code_dtype(self, xp: object) -> str:
        return self.dtype

    def quantize(self, rows: Array) -> Quantized:
        rows = finite_rows(rows)
        xp = array_namespace(rows)
        empty = rows.shape[-1] == 0  # a row without numbers has no maximum, and gets LEAST_SCALE
        largest = xp.sum(rows, axis=-1) if empty else xp.max(xp.abs(rows), axis=-1)
        # The divisor is an array: several libraries replace division by a Python scalar with a product with its reciprocal.
        limit = xp.full_like(largest, self.limit)
        scale = xp.maximum(largest / limit, xp.full_like(largest, LEAST_SCALE))
        with np.errstate(over="ignore"):  # check_read_back detects the overflow; NumPy would also warn
            check_read_back(self.name, scale * limit)
        quotient = rows / xp.broadcast_to(scale[..., None], rows.shape)
        limit = xp.full_like(quotient, self.limit)
        return Quantized(self.encode(xp.minimum(xp.maximum(quotient, -limit), limit)), scale)

    def dequantize(self, stored: Quantized, width: int) -> Array:
        assert stored.scale is not None
        return self.decode(stored.codes) * stored.scale[..., None]

    def bound(self, rows: Array, stored: Quantized) -> Array:
        assert stored.scale is not None
        return self.worst_error(rows, self.decode(stored.codes), stored.scale[..., None])


def _int8_encode(quotient: Array) -> Array:
    """int8 codes. The quotient was clipped to +-127, so that -128 never occurs (FMT-INT8-02)."""
    xp = array_namespace(quotient)
    return xp.astype(round_half_away(quotient), xp.int8)


def _int8_decode(codes: Array) -> Array:
    xp = array_namespace(codes)
    return xp.astype(codes, xp.float32)


def _float8_row(element: SmallFloat) -> SymmetricRow:
    return SymmetricRow(
        element.name,
        element.max,
        element.code_dtype,
        element.encode,
        element.decode,
        lambda rows, decoded, scale: bounds.float8_bound(rows, decoded, scale, element),
    )


int8 = SymmetricRow("int8", 127.0, "int8", _int8_encode, _int8_decode, bounds.int8_bound)
float8_e4m3fn = _float8_row(E4M3FN)
float8_e5m2 = _float8_row(E5M2)
