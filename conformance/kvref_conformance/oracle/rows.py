"""Quantized rows by their definition, and the bounds on what they read as.

Every operation is done in float64 and rounded to float32 at once, which is float32 arithmetic (see the package). Rows are
[n, width].
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle import elements, ggml, groups, mx, rotated, static
from kvref_conformance.oracle.formats import GGML, GROUPS, IN_GROUPS, MX, NVFP4, ROTATED, STATIC, bits_of, group_of, inner_of
from kvref_conformance.oracle.stored import Stored, U, fl, half_away

LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
STEPS = {"q8": 255, "q4": 15}


@np.errstate(invalid="ignore")
def store(rows: NDArray, format: str, chosen: NDArray | None = None, scale: float | None = None) -> Stored:
    """What is not finite in `values` is to be refused, NonFinite (FMT-LEVEL-05). chosen: codes, for where any will do.

    scale: where it is given (FMT-STATIC), 1.0 otherwise.
    """
    if format in STATIC:
        return static.store(rows, format, 1.0 if scale is None else scale)
    if format in ROTATED:
        inner = store(rotated.turned(rows), inner_of(format), chosen)
        values = rotated.turned(inner.values)
        return inner._replace(values=np.where(rotated.refused(np.asarray(rows))[:, None], np.float32(np.inf), values))
    if format in GGML:
        return ggml.store(rows, format, chosen)
    if format in IN_GROUPS:
        stored: Stored = (groups if format in GROUPS else mx).store(rows, format)
        return stored
    return _of_rows(np.asarray(rows, dtype=np.float32).astype(np.float64), format)


def _of_rows(x: NDArray, format: str) -> Stored:
    """With a scale each, and a zero each in formats that have one."""
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
    """What rows read back as, float32, and how far from it an implementation of level tolerant may be, float64.

    Of rotated rows that is as much for the length, an l2 norm, of what all values of a block are off (FMT-ROT-05).
    """

    values: NDArray
    slack: NDArray


def read_as(rows: NDArray, format: str, scale: float | None = None) -> Reads:
    """Rows [n, ...], each row's last axis with a scale of its own; plain dtypes are cast, and leave no slack."""
    rows = np.asarray(rows, dtype=np.float32)
    if format not in (*LIMIT, *STEPS, *IN_GROUPS, *STATIC, *ROTATED):
        return Reads(elements.round_to(rows, format), np.zeros(rows.shape))
    flat = rows.reshape(-1, rows.shape[-1])
    want = store(flat, format, scale=scale)
    exact, tolerant = bounds(flat, want, format)  # one may be as far from what was written, and the other
    if format in ROTATED:  # whose bound of a block's length is the other's as well
        return Reads(want.values.reshape(rows.shape), 2 * tolerant.reshape(rows.shape))
    slack = exact + tolerant
    if format in GROUPS and groups.scale_dtype(format) != "float32":  # a unit in the last place of 16 bits, which nobody sees
        slack = slack + np.abs(want.codes) * each_of(ulp_of_scales(want.scale, format), flat.shape[1])
    return Reads(want.values.reshape(rows.shape), slack.reshape(rows.shape))


def bounds(rows: NDArray, want: Stored, format: str) -> tuple[NDArray, NDArray]:
    """The bound of what is stored as it must be, and that at level tolerant.

    That is 4u more for the code, and what a scale one unit in the last place off moves a value. Rotated, it is the l2 norm of a
    block that is bounded at level tolerant.
    """
    if format in ROTATED:
        turned, inner = rotated.turned(rows), inner_of(format)
        between = store(turned, inner, want.codes)
        off = bounds(turned, between, inner)
        return rotated.bound(rows, between.values, off[0]), rotated.tolerant(rows, between, off[1], format)
    exact, x = bound(rows, want, format), np.asarray(rows, dtype=np.float64)
    return exact, exact * (1 + 4 * U) + 4 * U * np.abs(x) + 4 * U * np.abs(want.values)


@np.errstate(over="ignore", invalid="ignore")  # of rows that are to be refused
def bound(rows: NDArray, stored: Stored, format: str) -> NDArray:
    """The largest |x - value| there may be, float64 [n, width]."""
    codes, scale, zero, _ = stored
    if format in STATIC:
        return static.bound(rows, stored, format)
    if format in GGML:
        return ggml.bound(rows, stored, format)
    if format in GROUPS:
        return groups.bound(rows, codes, scale, zero, format)
    if format in IN_GROUPS:
        return mx.bound(rows, scale, format)
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


def inadmissible(rows: NDArray, codes: NDArray, format: str, made: Stored | None = None) -> list[tuple[int, int]]:
    """Where a code is further from x / s than rounding allows, |x/s - q| <= half a step + 4u|x/s|, in exact arithmetic.

    made: with the scales and zeros in it, in the place of those of the definition (FMT-GROUP-02).
    """
    want = store(rows, format, codes) if made is None else as_made(rows, made, format)
    clear = np.asarray(codes) == want.codes if made is None else groups.clearly(codes, quotients(rows, want, format), format)
    return [(int(n), int(i)) for n, i in np.argwhere(~clear) if not _may_be(rows, codes, want, n, i, format)]


def with_scales(rows: NDArray, made: Stored, format: str) -> Stored:
    """What rows are to be stored as, with the scales that somebody stored where FMT-LEVEL-02 allows them."""
    want = store(rows, format)
    if format not in GROUPS:
        return want
    near = np.abs(made.scale.astype(np.float64) - want.scale) <= ulp_of_scales(want.scale, format)
    near &= made.zero == want.zero
    mine = as_made(rows, made._replace(scale=np.where(near, made.scale, want.scale), zero=want.zero), format)
    return mine._replace(values=want.values)


def as_made(rows: NDArray, made: Stored, format: str) -> Stored:
    """The codes of FMT-GROUP-02 for the scales and zeros that somebody stored; the defined ones where they are no scales."""
    want = store(rows, format)
    sound = np.isfinite(made.scale) & (made.scale != 0)
    want = want._replace(
        scale=np.where(sound, made.scale, want.scale), zero=np.where(np.isfinite(made.zero), made.zero, want.zero)
    )
    least, top = 0 if groups.is_affine(format) else -groups.top_of(format), groups.top_of(format)
    return want._replace(codes=np.clip(np.rint(quotients(rows, want, format)), least, top).astype(np.int64))


def admissible_too(rows: NDArray, format: str) -> NDArray:
    """How far the other admissible code lies from the one of the definition: 1 where there is one, else 0."""
    want, x = store(rows, format), np.asarray(rows, dtype=np.float32)
    found = np.zeros(want.codes.shape, np.int64)
    for step in (1, -1):
        near = want.codes + step
        for n, i in np.argwhere(_may_admit(x, want, format)):
            found[n, i] |= _may_be(x, near, want, n, i, format)
    return found


def _may_be(rows: NDArray, codes: NDArray, want: Stored, n: int, i: int, format: str) -> bool:
    """Whether the code may stand for the number, in exact arithmetic."""
    x, code, slack = Fraction(float(rows[n, i])), int(codes[n, i]), Fraction(4, 2**24)
    if format in GGML:  # codes are made with a scale that is not stored
        block = slice(i // 32 * 32, i // 32 * 32 + 32)
        quotient = ggml.exact_quotient(rows[n, block], i % 32, format)
        return ggml.admits(code, quotient, 2 * slack * (abs(quotient) + 16), format)
    group = (n, i // group_of(format)) if format in IN_GROUPS else (n,)
    s, z = (Fraction(float(part[group])) for part in (want.scale, want.zero))
    quotient = (x - z) / s
    admits = groups.admits if format in GROUPS else mx.admits if format in IN_GROUPS else _admits
    return admits(code, quotient, slack * abs(quotient), format)


def quotients(rows: NDArray, want: Stored, format: str) -> NDArray:
    """What codes stand for, float64 [n, width]."""
    if format in GGML:
        return ggml.quotients(rows, format)
    scale, zero = (each_of(part, rows.shape[1]) for part in (want.scale, want.zero))
    return np.asarray((rows.astype(np.float64) - zero) / scale)


def each_of(scale: NDArray, width: int) -> NDArray:
    """float64 [n, width]: the scale, or zero, of each number of rows, of which there is one [n], or one a group [n, groups]."""
    held = np.asarray(scale, np.float64)
    count = held.shape[1] if held.ndim == 2 else 1
    return np.repeat(held.reshape(len(held), count), width // max(1, count), axis=1)


def _may_admit(x: NDArray, want: Stored, format: str) -> NDArray:
    """Where the quotient lies near a tie, by float64: the others need no fractions."""
    quotient = quotients(x, want, format)
    if format in elements.MAX or format in (*MX, *NVFP4) or format == "iq4_nl":
        worth = ggml.TABLE if format == "iq4_nl" else np.unique(worth_of(format))  # zero once: between its signs is no tie
        ties = (worth[1:] + worth[:-1]) / 2
        after = np.clip(np.searchsorted(ties, quotient), 1, len(ties) - 1)
        off = np.minimum(np.abs(ties[after] - quotient), np.abs(ties[after - 1] - quotient))
    else:
        off = np.abs(np.abs(quotient) - np.floor(np.abs(quotient)) - 0.5)
    near: NDArray = off <= 2.0**-20 * (np.abs(quotient) + 16 * (format in GGML)) + 2.0**-40
    return near


def worth_of(format: str) -> NDArray:
    """What the codes of small floats are worth, the finite ones."""
    worth = elements.decoded(format).astype(np.float64) if format in elements.MAX else mx.numbers(format)
    return np.asarray(worth[np.isfinite(worth)])


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


def a_byte_each(stored: NDArray, width: int, format: str) -> bool:
    """Whether codes of less than a byte are not packed: there are as many bytes as numbers."""
    return format in (*GROUPS, *MX, *NVFP4) and bits_of(format) < 8 and np.shape(stored)[1:] == (width,)


def unpacked(stored: NDArray, width: int, format: str) -> NDArray:
    """int64 [n, width]: the codes of rows as they are stored, by the bits of their bytes, the low ones first."""
    if format in GGML:
        return ggml.read(stored, format).codes
    bits = bits_of(format)
    if bits == 8 or a_byte_each(stored, width, format):
        codes = np.asarray(stored).astype(np.int64)
    else:
        each = np.unpackbits(np.asarray(stored, np.uint8), axis=1, count=width * bits, bitorder="little")
        codes = each.reshape(len(each), width, bits).astype(np.int64) @ (1 << np.arange(bits))
    signed = format in GROUPS and not groups.is_affine(format)
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes


def as_read(codes: NDArray, scale: NDArray | None, zero: NDArray | None, width: int, format: str, values: NDArray) -> Stored:
    """Rows as somebody stores them, codes unpacked and scales as float32; NaN for a zero that is missing where one has to be."""
    if format in GGML:
        got = ggml.read(np.asarray(codes, np.uint8), format)
        return Stored(got.codes, got.scale.astype(np.float32), got.least.astype(np.float32), values)
    assert scale is not None
    worth = scale_worth(scale, format)
    needed = format in STEPS or (format in GROUPS and groups.is_affine(format))
    zeros = np.full_like(worth, np.nan if needed else 0) if zero is None else scale_worth(zero, format)
    return Stored(unpacked(codes, width, format), worth, zeros, values)


def said(codes: NDArray, scale: NDArray, zero: NDArray | None, width: int, format: str) -> NDArray:
    """float32 [n, width]: what rows that are stored so read back as, by their definition."""
    plain = unpacked(codes, width, format)
    if format in (*MX, *NVFP4):
        decoded = mx.numbers(format)[plain]
    else:
        decoded = elements.decoded(format)[plain] if format in elements.MAX else plain
    values = fl(decoded * each_of(scale_worth(scale, format), width))
    if zero is not None:
        values = fl(values + each_of(scale_worth(zero, format), width))
    return values.astype(np.float32)


def packed(want: Stored, format: str) -> NDArray:
    """[n, bytes]: the rows' codes as they are to be stored."""
    if format in GGML:
        return ggml.write(want.codes, want.scale, want.zero, format)
    bits = bits_of(format)
    if bits == 8 and format not in IN_GROUPS:
        return want.codes
    each = (want.codes[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(each.reshape(len(each), -1).astype(np.uint8), axis=1, bitorder="little")


def scale_worth(stored: NDArray, format: str) -> NDArray:
    """float32: what scales or zeros are that are stored as numbers, or as codes where the library lacks the dtype."""
    stored = np.asarray(stored)
    if format in (*MX, *NVFP4):
        return mx.scales(stored, format).astype(np.float32)
    if stored.dtype == np.uint16:
        return np.asarray(elements.decoded(groups.scale_dtype(format))[stored])
    return stored.astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # of scales that are no numbers
def ulp_of_scales(scale: NDArray, format: str) -> NDArray:
    """float64: one unit in the last place of the dtype that scales are stored in; 0 of powers of two."""
    if format in MX:
        return np.zeros(np.shape(scale))
    if format in NVFP4:
        return np.asarray(np.ldexp(1.0, np.frexp(np.asarray(scale, np.float64))[1] - 4))
    dtype = "float16" if format in GGML else groups.scale_dtype(format) if format in GROUPS else "float32"
    if dtype == "float16":
        held = np.minimum(np.abs(np.asarray(scale, np.float32)), 65504).astype(np.float16)
        return np.spacing(np.where(held == 65504, np.float16(32768), held)).astype(np.float64)  # as below it: beyond is no number
    spacing = np.spacing(np.asarray(scale, np.float32)).astype(np.float64)
    return np.asarray(spacing * (2.0**16 if dtype == "bfloat16" else 1.0))
