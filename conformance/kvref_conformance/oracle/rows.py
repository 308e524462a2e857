"""Quantized rows by their definition, and the bounds on what they read as.

Every operation is done in float64 and rounded to float32 at once, which is float32 arithmetic (see the package). Rows are
[n, width].
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle import elements

U = 2.0**-24
LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
STEPS = {"q8": 255, "q4": 15}


class Stored(NamedTuple):
    codes: NDArray  # one code an element, unpacked
    scale: NDArray  # float32 [n]
    zero: NDArray  # float32 [n], zeros in symmetric formats
    values: NDArray  # float32, what it reads as


@np.errstate(over="ignore")
def fl(x: NDArray) -> NDArray:
    """Rounded to float32, as float64: what passes its end is infinite."""
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def half_away(x: NDArray) -> NDArray:
    """Halves away from zero; exact, since x is a float32 held in float64."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


@np.errstate(invalid="ignore")
def store(rows: NDArray, format: str) -> Stored:
    """What is not finite in `values` is to be refused, NonFinite (FMT-LEVEL-05)."""
    x = np.asarray(rows, dtype=np.float32).astype(np.float64)
    if format in STEPS:
        zero = x.min(axis=-1)
        scale = np.maximum(fl(fl(x.max(axis=-1) - zero) / STEPS[format]), np.float32(1e-8))
        codes = np.clip(half_away(fl(fl(x - zero[:, None]) / scale[:, None])), 0, STEPS[format])
        values = fl(fl(codes * scale[:, None]) + zero[:, None])
    else:
        zero = np.zeros(len(x))
        limit = LIMIT[format]
        scale = np.maximum(fl(np.abs(x).max(axis=-1) / limit), 2.0**-23)
        quotient = np.clip(fl(x / scale[:, None]), -limit, limit)
        if format == "int8":
            codes = decoded = np.clip(half_away(quotient), -127, 127) + 0.0  # an integer has no -0
        else:
            codes = elements.encode(quotient, format)
            decoded = elements.decoded(format)[codes]
        values = fl(decoded * scale[:, None])
    return Stored(codes.astype(np.int64), scale.astype(np.float32), zero.astype(np.float32), values.astype(np.float32))


class Reads(NamedTuple):
    """What rows read back as, float32, and how far from it an implementation of level tolerant may be, float64."""

    values: NDArray
    slack: NDArray


def read_as(rows: NDArray, format: str) -> Reads:
    """Rows [n, ...], each row's last axis with a scale of its own; plain dtypes are cast, and leave no slack."""
    rows = np.asarray(rows, dtype=np.float32)
    if format not in LIMIT and format not in STEPS:
        return Reads(elements.round_to(rows, format), np.zeros(rows.shape))
    flat = rows.reshape(-1, rows.shape[-1])
    want = store(flat, format)
    exact, tolerant = bounds(flat, want, format)  # one may be as far from what was written, and the other
    return Reads(want.values.reshape(rows.shape), (exact + tolerant).reshape(rows.shape))


def bounds(rows: NDArray, want: Stored, format: str) -> tuple[NDArray, NDArray]:
    """The bound of what is stored as it must be, and that at level tolerant.

    That is 4u more for the code, and what a scale one unit in the last place off moves a value.
    """
    exact, x = bound(rows, want.codes, want.scale, want.zero, format), np.asarray(rows, dtype=np.float64)
    return exact, exact * (1 + 4 * U) + 4 * U * np.abs(x) + 4 * U * np.abs(want.values)


@np.errstate(over="ignore", invalid="ignore")  # of rows that are to be refused
def bound(rows: NDArray, codes: NDArray, scale: NDArray, zero: NDArray, format: str) -> NDArray:
    """The largest |x - value| there may be, float64 [n, width]; codes as stored by whoever is judged."""
    x = np.abs(np.asarray(rows, dtype=np.float64))
    s, z = np.asarray(scale, dtype=np.float64)[:, None], np.asarray(zero, dtype=np.float64)[:, None]
    if format in STEPS:
        product = codes * s
        offset = np.abs(np.asarray(rows, dtype=np.float64) - z)
        return s / 2 + (2 * U + U * U) * offset + U * product + U * (1 + 2 * U) * np.abs(product + z) + 2.0**-149
    if format == "int8":
        return s / 2 + U * x + U * np.abs(codes) * s
    decoded = np.abs(elements.decoded(format)[codes].astype(np.float64))
    relative, absolute = (1 / 17, 2.0**-10) if format == "float8_e4m3fn" else (1 / 9, 2.0**-17)
    return np.maximum(relative * x, absolute * s) * (1 + 2 * U) + U * x + U * decoded * s


def inadmissible(rows: NDArray, codes: NDArray, format: str) -> list[tuple[int, int]]:
    """Where a code is further from x / s than rounding allows, |x/s - q| <= half a step + 4u|x/s|, in exact arithmetic."""
    want = store(rows, format)
    wrong = []
    for n, i in np.argwhere(np.asarray(codes) != want.codes):
        x, s, z = (Fraction(float(part)) for part in (rows[n, i], want.scale[n], want.zero[n]))
        quotient = (x - z) / s
        slack = Fraction(4, 2**24) * abs(quotient)
        if not _admits(int(codes[n, i]), quotient, slack, format):
            wrong.append((int(n), int(i)))
    return wrong


def admissible_too(rows: NDArray, format: str) -> NDArray:
    """How far the other admissible code lies from the one of the definition: 1 where there is one, else 0."""
    want, x = store(rows, format), np.asarray(rows, dtype=np.float32)
    found = np.zeros(want.codes.shape, np.int64)
    for step in (1, -1):
        near = want.codes + step
        for n, i in np.argwhere(_may_admit(x, want, format)):
            q = (Fraction(float(x[n, i])) - Fraction(float(want.zero[n]))) / Fraction(float(want.scale[n]))
            found[n, i] |= _admits(int(near[n, i]), q, Fraction(4, 2**24) * abs(q), format)
    return found


def _may_admit(x: NDArray, want: Stored, format: str) -> NDArray:
    """Where the quotient lies near a tie, by float64: the others need no fractions."""
    quotient = np.abs((x.astype(np.float64) - want.zero[:, None]) / want.scale[:, None].astype(np.float64))
    if format in elements.MAX:
        ties = elements.midpoints(format)
        nearest = ties[np.clip(np.searchsorted(ties, quotient), 0, len(ties) - 1)]
        before = ties[np.clip(np.searchsorted(ties, quotient) - 1, 0, len(ties) - 1)]
        off = np.minimum(np.abs(nearest - quotient), np.abs(before - quotient))
    else:
        off = np.abs(quotient - np.floor(quotient) - 0.5)
    near: NDArray = off <= 2.0**-20 * quotient + 2.0**-40
    return near


def _admits(code: int, quotient: Fraction, slack: Fraction, format: str) -> bool:
    if format == "int8" or format in STEPS:
        low, high = (-127, 127) if format == "int8" else (0, STEPS[format])
        return low <= code <= high and abs(quotient - code) <= Fraction(1, 2) + slack
    value = elements.exact_value(code, format)
    if not isinstance(value, Fraction):
        return False
    magnitudes = elements.magnitudes(format)
    above = int(np.searchsorted(magnitudes, float(abs(quotient))))  # one off at most, where the float was rounded
    around = magnitudes[max(0, above - 2) : above + 2].tolist()
    nearest = min(abs(abs(quotient) - Fraction(each)) for each in around)
    return abs(quotient - value) <= nearest + 2 * slack


def unpack4(packed: NDArray, width: int) -> NDArray:
    """Two codes a byte, the even index in the low nibble: said byte by byte."""
    rows = []
    for row in np.asarray(packed).tolist():
        nibbles = [nibble for byte in row for nibble in (byte % 16, byte // 16)]
        rows.append(nibbles[:width])
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def adversarial(rng: np.random.Generator, width: int, format: str, count: int = 24) -> NDArray:
    """Rows that find rounding mistakes, float32 [n, width]: see each line. Nothing overflows when read back."""
    limit = LIMIT.get(format, 1.0)
    gaussian = rng.normal(size=(count, width)) * 2.0 ** rng.integers(-20, 20, size=(count, 1))
    halves = rng.integers(-126, 126, size=(count, width)) + 0.5  # every quotient a tie once the maximum is 127
    halves[:, 0] = 127
    above_limit = rng.normal(size=(count, width))
    above_limit[:, 0] = float.fromhex("0x1.00000cp+0") * 2.0 ** rng.integers(-8, 8, size=count)  # m / s an ulp past the limit
    below_half = np.full((2, width), 0.49999997)
    below_half[:, 0] = [127, -127]
    offset = 1000 + rng.normal(size=(count, width)) * 1e-3  # a large offset with a tiny range
    plain = np.array([[0.0] * width, [-0.0] * width, [3.25] * width, [-1e-30] * width, [1e-40] * width, [3e38] * width])
    if format in STEPS:
        plain[-1] = 1e38
    if format.startswith("float8"):
        tied = rng.choice(elements.midpoints(format)[:-1], size=(count, width))
        tied[:, 0] = limit
        halves = tied
    half_max = rng.normal(size=(4, width))
    half_max[:, 0], half_max[:, -1] = 2.0, 1.0 if width > 1 else 2.0  # an element at m / 2: 63.5
    half_max = np.clip(half_max, -2, 2)
    parts = [gaussian, halves, above_limit, below_half, offset, plain, half_max]
    return np.concatenate(parts).astype(np.float32)
