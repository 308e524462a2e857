"""FP8 with a static scale, by its definition (FMT-STATIC). The scale is given, and does not depend on the rows."""

from fractions import Fraction

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import element_of, small_floats
from kvref_conformance.oracle.formats.stored_rows import StoredRows, U, round_to_float32


def store(rows: NDArray, format: str, scale: float) -> StoredRows:
    """Quantize rows with this scale."""
    x, element, s = np.asarray(rows, np.float32).astype(np.float64), element_of(format), float(np.float32(scale))
    most = small_floats.MAX[element]
    codes = small_floats.encode(np.clip(round_to_float32(x / s), -most, most), element)
    values = round_to_float32(small_floats.decoded(element)[codes].astype(np.float64) * s)
    return StoredRows(
        codes.astype(np.int64), np.full(len(x), s, np.float32), np.zeros(len(x), np.float32), values.astype(np.float32)
    )


def decode_values(codes: NDArray, format: str, scale: float) -> NDArray:
    """The values of codes, float32."""
    return round_to_float32(small_floats.decoded(element_of(format))[codes].astype(np.float64) * float(np.float32(scale))).astype(
        np.float32
    )


def bound(rows: NDArray, stored: StoredRows, format: str) -> NDArray:
    """The largest |x - value|: half a unit of the code (as in FMT-FP8-09), or, beyond the largest number, the clipped part."""
    x, s = np.abs(np.asarray(rows, np.float64)), stored.scale.astype(np.float64)[:, None]
    relative, absolute = (1 / 17, 2.0**-10) if element_of(format) == "float8_e4m3fn" else (1 / 9, 2.0**-17)
    decoded = np.abs(small_floats.decoded(element_of(format))[stored.codes].astype(np.float64))
    near = np.maximum(relative * x, absolute * s) * (1 + 2 * U) + U * x + U * decoded * s
    beyond = x - small_floats.MAX[element_of(format)] * s * (1 - U)
    return np.asarray(np.maximum(near, beyond) + 2.0**-149)


def inadmissible(rows: NDArray, codes: NDArray, format: str, scale: float) -> list[tuple[int, int]]:
    """The (row, element) of codes that are not admissible, in exact arithmetic (FMT-LEVEL-02).

    A code is admissible if it is at most 8u|x / s| further from the clipped x / s than the definition's code.
    """
    want, element, s = store(rows, format, scale), element_of(format), Fraction(float(np.float32(scale)))
    most, wrong = Fraction(small_floats.MAX[element]), []
    for n, i in np.argwhere(np.asarray(codes) != want.codes):
        quotient = Fraction(float(rows[n, i])) / s
        clipped = min(max(quotient, -most), most)
        got, right = (small_floats.exact_value(int(each[n, i]), element) for each in (codes, want.codes))
        assert isinstance(right, Fraction)
        if not isinstance(got, Fraction) or abs(clipped - got) > abs(clipped - right) + Fraction(8, 2**24) * abs(clipped):
            wrong.append((int(n), int(i)))
    return wrong


def admissible_too(rows: NDArray, format: str, scale: float) -> NDArray:
    """1 where another code next to the definition's is admissible too, 0 elsewhere, int64 [n, width]."""
    want = store(rows, format, scale)
    found = np.ones(want.codes.shape, np.int64)
    for step in (1, -1):
        wrong = inadmissible(rows, want.codes + step, format, scale)
        found[tuple(np.array(wrong, np.int64).reshape(-1, 2).T)] += 1
    return np.asarray(found <= 2).astype(np.int64)
