"""Quantized rows [n, width] by their definition, and the error bounds of their values.

Each operation is computed in float64 and immediately rounded to float32, which equals float32 arithmetic (see the docstring of
the package). "x / s" below is the quotient that a code represents; u is 2^-24.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import (
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    MX_FORMATS,
    NVFP4_FORMATS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
    bits_of,
    ggml,
    group_of,
    hadamard_rotation,
    inner_of,
    mx,
    per_group,
    small_floats,
    static_scale,
)
from kvref_conformance.oracle.formats.stored_rows import StoredRows, U, round_half_away, round_to_float32

LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
STEPS = {"q8": 255, "q4": 15}


@np.errstate(invalid="ignore")
def store(rows: NDArray, format: str, chosen: NDArray | None = None, scale: float | None = None) -> StoredRows:
    """Quantize rows. Where the result's `values` are not finite, storing must raise NonFinite (FMT-LEVEL-05).

    chosen: codes to use where any code is correct. scale: the scale of a static format (FMT-STATIC), default 1.0.
    """
    if format in STATIC_FORMATS:
        return static_scale.store(rows, format, 1.0 if scale is None else scale)
    if format in ROTATED_FORMATS:
        inner = store(hadamard_rotation.rotate_rows(rows), inner_of(format), chosen)
        values = hadamard_rotation.rotate_rows(inner.values)
        return inner._replace(
            values=np.where(hadamard_rotation.may_overflow(np.asarray(rows))[:, None], np.float32(np.inf), values)
        )
    if format in GGML_FORMATS:
        return ggml.store(rows, format, chosen)
    if format in FORMATS_IN_GROUPS:
        stored: StoredRows = (per_group if format in GROUP_FORMATS else mx).store(rows, format)
        return stored
    return _store_rows(np.asarray(rows, dtype=np.float32).astype(np.float64), format)


def _store_rows(x: NDArray, format: str) -> StoredRows:
    """Quantize rows with one scale per row, and one zero per row in affine formats."""
    if format in STEPS:
        zero = x.min(axis=-1)
        scale = np.maximum(round_to_float32(round_to_float32(x.max(axis=-1) - zero) / STEPS[format]), np.float32(1e-8))
        codes = np.clip(round_half_away(round_to_float32(round_to_float32(x - zero[:, None]) / scale[:, None])), 0, STEPS[format])
        values = round_to_float32(round_to_float32(codes * scale[:, None]) + zero[:, None])
    else:
        zero = np.zeros(len(x))
        limit = LIMIT[format]
        scale = np.maximum(round_to_float32(np.abs(x).max(axis=-1) / limit), 2.0**-23)
        quotient = np.clip(round_to_float32(x / scale[:, None]), -limit, limit)
        if format == "int8":
            codes = decoded = np.clip(round_half_away(quotient), -127, 127) + 0.0  # an integer has no -0
        else:
            codes = small_floats.encode(quotient, format)
            decoded = small_floats.decoded(format)[codes]
        values = round_to_float32(decoded * scale[:, None])
    return StoredRows(codes.astype(np.int64), scale.astype(np.float32), zero.astype(np.float32), values.astype(np.float32))


class ExpectedReads(NamedTuple):
    """The expected values of rows, float32, and the largest permitted error at level tolerant (slack), float64.

    For rotated rows the slack also limits the l2 norm of the errors of each block (FMT-ROT-05).
    """

    values: NDArray
    slack: NDArray


def read_as(rows: NDArray, format: str, scale: float | None = None) -> ExpectedReads:
    """The values of rows [..., width] after storing and reading, with the slack. Plain dtypes are cast, and have no slack."""
    rows = np.asarray(rows, dtype=np.float32)
    if format not in (*LIMIT, *STEPS, *FORMATS_IN_GROUPS, *STATIC_FORMATS, *ROTATED_FORMATS):
        return ExpectedReads(small_floats.round_to(rows, format), np.zeros(rows.shape))
    flat = rows.reshape(-1, rows.shape[-1])
    want = store(flat, format, scale=scale)
    # Both bounds are relative to the written rows. The values of the definition and of an implementation may be on either side
    # of a written number, so the slack between them is the sum of both bounds.
    exact, tolerant = bounds(flat, want, format)
    if format in ROTATED_FORMATS:  # here the exact values are within the tolerant bound, too
        return ExpectedReads(want.values.reshape(rows.shape), 2 * tolerant.reshape(rows.shape))
    slack = exact + tolerant
    if (
        format in GROUP_FORMATS and per_group.scale_dtype(format) != "float32"
    ):  # the stored scale may be off by one unit in the last place
        slack = slack + np.abs(want.codes) * each_of(ulp_of_scales(want.scale, format), flat.shape[1])
    return ExpectedReads(want.values.reshape(rows.shape), slack.reshape(rows.shape))


def bounds(rows: NDArray, want: StoredRows, format: str) -> tuple[NDArray, NDArray]:
    """The error bounds of values at level exact and at level tolerant, float64 [n, width].

    The tolerant bound adds 4u for the code, and the effect of a scale that is off by one unit in the last place. For rotated rows
    the tolerant bound limits the l2 norm of the errors of a block.
    """
    if format in ROTATED_FORMATS:
        turned, inner = hadamard_rotation.rotate_rows(rows), inner_of(format)
        between = store(turned, inner, want.codes)
        off = bounds(turned, between, inner)
        return hadamard_rotation.bound(rows, between.values, off[0]), hadamard_rotation.read_tolerance(
            rows, between, off[1], format
        )
    exact, x = bound(rows, want, format), np.asarray(rows, dtype=np.float64)
    return exact, exact * (1 + 4 * U) + 4 * U * np.abs(x) + 4 * U * np.abs(want.values)


@np.errstate(over="ignore", invalid="ignore")  # for rows that must raise NonFinite
def bound(rows: NDArray, stored: StoredRows, format: str) -> NDArray:
    """The largest possible |x - value| at level exact, float64 [n, width]."""
    codes, scale, zero, _ = stored
    if format in STATIC_FORMATS:
        return static_scale.bound(rows, stored, format)
    if format in GGML_FORMATS:
        return ggml.bound(rows, stored, format)
    if format in GROUP_FORMATS:
        return per_group.bound(rows, codes, scale, zero, format)
    if format in FORMATS_IN_GROUPS:
        return mx.bound(rows, scale, format)
    x = np.abs(np.asarray(rows, dtype=np.float64))
    s, z = np.asarray(scale, dtype=np.float64)[:, None], np.asarray(zero, dtype=np.float64)[:, None]
    if format in STEPS:
        product = codes * s
        offset = np.abs(np.asarray(rows, dtype=np.float64) - z)
        return s / 2 + (2 * U + U * U) * offset + U * product + U * (1 + 2 * U) * np.abs(product + z) + 2.0**-149
    if format == "int8":
        return s / 2 + U * x + U * np.abs(codes) * s
    decoded = np.abs(small_floats.decoded(format)[codes].astype(np.float64))
    relative, absolute = (1 / 17, 2.0**-10) if format == "float8_e4m3fn" else (1 / 9, 2.0**-17)
    return np.maximum(relative * x, absolute * s) * (1 + 2 * U) + U * x + U * decoded * s


def inadmissible(rows: NDArray, codes: NDArray, format: str, made: StoredRows | None = None) -> list[tuple[int, int]]:
    """The (row, element) of codes q that are not admissible: |x/s - q| > half a step + 4u|x/s|, in exact arithmetic.

    made: rows whose scales and zeros are used in place of the definition's (FMT-GROUP-02).
    """
    want = store(rows, format, codes) if made is None else codes_for_scales(rows, made, format)
    clear = (
        np.asarray(codes) == want.codes
        if made is None
        else per_group.clearly_admissible(codes, quotients(rows, want, format), format)
    )
    return [(int(n), int(i)) for n, i in np.argwhere(~clear) if not _is_admissible(rows, codes, want, n, i, format)]


def with_scales(rows: NDArray, made: StoredRows, format: str) -> StoredRows:
    """The expected rows for the scales in `made`, as far as FMT-LEVEL-02 permits them; otherwise for the definition's scales."""
    want = store(rows, format)
    if format not in GROUP_FORMATS:
        return want
    near = np.abs(made.scale.astype(np.float64) - want.scale) <= ulp_of_scales(want.scale, format)
    near &= made.zero == want.zero
    mine = codes_for_scales(rows, made._replace(scale=np.where(near, made.scale, want.scale), zero=want.zero), format)
    return mine._replace(values=want.values)


def codes_for_scales(rows: NDArray, made: StoredRows, format: str) -> StoredRows:
    """The codes of FMT-GROUP-02 for the scales and zeros in `made`; invalid ones are replaced by the definition's."""
    want = store(rows, format)
    sound = np.isfinite(made.scale) & (made.scale != 0)
    want = want._replace(
        scale=np.where(sound, made.scale, want.scale), zero=np.where(np.isfinite(made.zero), made.zero, want.zero)
    )
    least, top = 0 if per_group.is_affine(format) else -per_group.top_of(format), per_group.top_of(format)
    return want._replace(codes=np.clip(np.rint(quotients(rows, want, format)), least, top).astype(np.int64))


def admissible_too(rows: NDArray, format: str) -> NDArray:
    """1 where another code next to the definition's is admissible too, 0 elsewhere, int64 [n, width]."""
    want, x = store(rows, format), np.asarray(rows, dtype=np.float32)
    found = np.zeros(want.codes.shape, np.int64)
    for step in (1, -1):
        near = want.codes + step
        for n, i in np.argwhere(_may_admit(x, want, format)):
            found[n, i] |= _is_admissible(x, near, want, n, i, format)
    return found


def _is_admissible(rows: NDArray, codes: NDArray, want: StoredRows, n: int, i: int, format: str) -> bool:
    """Whether the code of number i of row n is admissible, in exact arithmetic."""
    x, code, slack = Fraction(float(rows[n, i])), int(codes[n, i]), Fraction(4, 2**24)
    if format in GGML_FORMATS:  # codes are computed with the scale before it is rounded to float16
        block = slice(i // 32 * 32, i // 32 * 32 + 32)
        quotient = ggml.exact_quotient(rows[n, block], i % 32, format)
        return ggml.admits(code, quotient, 2 * slack * (abs(quotient) + 16), format)
    group = (n, i // group_of(format)) if format in FORMATS_IN_GROUPS else (n,)
    s, z = (Fraction(float(part[group])) for part in (want.scale, want.zero))
    quotient = (x - z) / s
    admits = per_group.admits if format in GROUP_FORMATS else mx.admits if format in FORMATS_IN_GROUPS else _admits
    return admits(code, quotient, slack * abs(quotient), format)


def quotients(rows: NDArray, want: StoredRows, format: str) -> NDArray:
    """The quotients that codes represent, (x - zero) / scale, float64 [n, width]."""
    if format in GGML_FORMATS:
        return ggml.quotients(rows, format)
    scale, zero = (each_of(part, rows.shape[1]) for part in (want.scale, want.zero))
    return np.asarray((rows.astype(np.float64) - zero) / scale)


def each_of(scale: NDArray, width: int) -> NDArray:
    """The scale (or zero) of each number, float64 [n, width], from one per row [n] or one per group [n, groups]."""
    held = np.asarray(scale, np.float64)
    count = held.shape[1] if held.ndim == 2 else 1
    return np.repeat(held.reshape(len(held), count), width // max(1, count), axis=1)


def _may_admit(x: NDArray, want: StoredRows, format: str) -> NDArray:
    """Where a quotient is near a tie, computed in float64, bool [n, width]. Elsewhere only one code is admissible."""
    quotient = quotients(x, want, format)
    if format in small_floats.MAX or format in (*MX_FORMATS, *NVFP4_FORMATS) or format == "iq4_nl":
        worth = ggml.TABLE if format == "iq4_nl" else np.unique(worth_of(format))  # 0 and -0 are one value, without a tie
        ties = (worth[1:] + worth[:-1]) / 2
        after = np.clip(np.searchsorted(ties, quotient), 1, len(ties) - 1)
        off = np.minimum(np.abs(ties[after] - quotient), np.abs(ties[after - 1] - quotient))
    else:
        off = np.abs(np.abs(quotient) - np.floor(np.abs(quotient)) - 0.5)
    near: NDArray = off <= 2.0**-20 * (np.abs(quotient) + 16 * (format in GGML_FORMATS)) + 2.0**-40
    return near


def worth_of(format: str) -> NDArray:
    """The finite values of the codes of a format with small floats, float64."""
    worth = small_floats.decoded(format).astype(np.float64) if format in small_floats.MAX else mx.numbers(format)
    return np.asarray(worth[np.isfinite(worth)])


def _admits(code: int, quotient: Fraction, slack: Fraction, format: str) -> bool:
    """Whether a code is admissible for a quotient, in formats with one scale per row."""
    if format == "int8" or format in STEPS:
        low, high = (-127, 127) if format == "int8" else (0, STEPS[format])
        return low <= code <= high and abs(quotient - code) <= Fraction(1, 2) + slack
    value = small_floats.exact_value(code, format)
    if not isinstance(value, Fraction):
        return False
    magnitudes = small_floats.magnitudes(format)
    above = int(np.searchsorted(magnitudes, float(abs(quotient))))  # off by at most one, because the float is rounded
    around = magnitudes[max(0, above - 2) : above + 2].tolist()
    nearest = min(abs(abs(quotient) - Fraction(each)) for each in around)
    return abs(quotient - value) <= nearest + 2 * slack


def a_byte_each(stored: NDArray, width: int, format: str) -> bool:
    """Whether codes of less than a byte are stored unpacked, with one byte per number."""
    return format in (*GROUP_FORMATS, *MX_FORMATS, *NVFP4_FORMATS) and bits_of(format) < 8 and np.shape(stored)[1:] == (width,)


def unpacked(stored: NDArray, width: int, format: str) -> NDArray:
    """Unpack stored codes to int64 [n, width]. The bits of a byte are used from the lowest."""
    if format in GGML_FORMATS:
        return ggml.read(stored, format).codes
    bits = bits_of(format)
    if bits == 8 or a_byte_each(stored, width, format):
        codes = np.asarray(stored).astype(np.int64)
    else:
        each = np.unpackbits(np.asarray(stored, np.uint8), axis=1, count=width * bits, bitorder="little")
        codes = each.reshape(len(each), width, bits).astype(np.int64) @ (1 << np.arange(bits))
    signed = format in GROUP_FORMATS and not per_group.is_affine(format)
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes


def as_read(codes: NDArray, scale: NDArray | None, zero: NDArray | None, width: int, format: str, values: NDArray) -> StoredRows:
    """Results of an implementation as StoredRows: codes unpacked, scales as float32. A missing zero (affine formats) is NaN."""
    if format in GGML_FORMATS:
        got = ggml.read(np.asarray(codes, np.uint8), format)
        return StoredRows(got.codes, got.scale.astype(np.float32), got.least.astype(np.float32), values)
    assert scale is not None
    worth = scale_worth(scale, format)
    needed = format in STEPS or (format in GROUP_FORMATS and per_group.is_affine(format))
    zeros = np.full_like(worth, np.nan if needed else 0) if zero is None else scale_worth(zero, format)
    return StoredRows(unpacked(codes, width, format), worth, zeros, values)


def said(codes: NDArray, scale: NDArray, zero: NDArray | None, width: int, format: str) -> NDArray:
    """The values of stored rows by their definition, float32 [n, width]."""
    plain = unpacked(codes, width, format)
    if format in (*MX_FORMATS, *NVFP4_FORMATS):
        decoded = mx.numbers(format)[plain]
    else:
        decoded = small_floats.decoded(format)[plain] if format in small_floats.MAX else plain
    values = round_to_float32(decoded * each_of(scale_worth(scale, format), width))
    if zero is not None:
        values = round_to_float32(values + each_of(scale_worth(zero, format), width))
    return values.astype(np.float32)


def packed(want: StoredRows, format: str) -> NDArray:
    """The codes of rows as they must be stored, [n, bytes]; GGML blocks include the scales."""
    if format in GGML_FORMATS:
        return ggml.write(want.codes, want.scale, want.zero, format)
    bits = bits_of(format)
    if bits == 8 and format not in FORMATS_IN_GROUPS:
        return want.codes
    each = (want.codes[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(each.reshape(len(each), -1).astype(np.uint8), axis=1, bitorder="little")


def scale_worth(stored: NDArray, format: str) -> NDArray:
    """Scales or zeros as float32. They may be stored as numbers, or as the codes of a dtype that the library lacks."""
    stored = np.asarray(stored)
    if format in (*MX_FORMATS, *NVFP4_FORMATS):
        return mx.scales(stored, format).astype(np.float32)
    if stored.dtype == np.uint16:
        return np.asarray(small_floats.decoded(per_group.scale_dtype(format))[stored])
    return stored.astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # for scales that are NaN or infinite
def ulp_of_scales(scale: NDArray, format: str) -> NDArray:
    """One unit in the last place of scales, in the dtype in which they are stored, float64; 0 for powers of two (MX)."""
    if format in MX_FORMATS:
        return np.zeros(np.shape(scale))
    if format in NVFP4_FORMATS:
        return np.asarray(np.ldexp(1.0, np.frexp(np.asarray(scale, np.float64))[1] - 4))
    dtype = "float16" if format in GGML_FORMATS else per_group.scale_dtype(format) if format in GROUP_FORMATS else "float32"
    if dtype == "float16":
        held = np.minimum(np.abs(np.asarray(scale, np.float32)), 65504).astype(np.float16)
        # 65504 is the largest float16; its unit is that of the numbers below it.
        return np.spacing(np.where(held == 65504, np.float16(32768), held)).astype(np.float64)
    spacing = np.spacing(np.asarray(scale, np.float32)).astype(np.float64)
    return np.asarray(spacing * (2.0**16 if dtype == "bfloat16" else 1.0))
