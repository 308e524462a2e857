"""The blocks of ggml by their definition (FMT-GGML): their memory layout, and the steps of the quantizers, rounded one by one."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.stored_rows import StoredRows, U, round_half_away, round_to_float32, split_groups

BLOCK = 32
_D, _M, _H, _Q = ("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)
LAYOUT = {
    "q8_0": np.dtype([_D, ("qs", "i1", 32)]), "q4_0": np.dtype([_D, _Q]), "q4_1": np.dtype([_D, _M, _Q]),
    "q5_0": np.dtype([_D, _H, _Q]), "q5_1": np.dtype([_D, _M, _H, _Q]), "iq4_nl": np.dtype([_D, _Q]),
}  # fmt: skip
ZERO = {"q4_0": 8, "q5_0": 16}  # the code of the value 0
TOP = {"q4_0": 15, "q4_1": 15, "q5_0": 31, "q5_1": 31}
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)


class DecodedBlock(NamedTuple):
    """Decoded blocks: codes [n, width], scale and least value [n, blocks], values [n, width]."""

    codes: NDArray
    scale: NDArray
    least: NDArray
    values: NDArray


def read(stored: NDArray, format: str) -> DecodedBlock:
    """Decode blocks, uint8 [n, bytes]."""
    blocks = np.ascontiguousarray(stored).view(LAYOUT[format])  # [n, blocks]
    codes = blocks["qs"].astype(np.int64)
    if format != "q8_0":
        codes = np.concatenate([codes % 16, codes // 16], axis=2)  # a byte contains code i and code i + 16
    if "qh" in (blocks.dtype.names or ()):
        codes += 16 * (blocks["qh"].astype(np.int64)[:, :, None] >> np.arange(32) & 1)
    scale = blocks["d"].astype(np.float64)
    least = blocks["m"].astype(np.float64) if "m" in (blocks.dtype.names or ()) else np.zeros(scale.shape)
    flat = (len(stored), codes.shape[1] * BLOCK)
    return DecodedBlock(codes.reshape(flat), scale, least, _values(codes, scale, least, format).reshape(flat))


def write(codes: NDArray, scale: NDArray, least: NDArray, format: str) -> NDArray:
    """Encode blocks, uint8 [n, bytes]. The inverse of `read`."""
    codes = np.asarray(codes).reshape(len(codes), -1, BLOCK)
    blocks = np.zeros(codes.shape[:2], LAYOUT[format])
    names = blocks.dtype.names or ()
    with np.errstate(over="ignore"):
        blocks["d"] = scale.astype(np.float32)
        if "m" in names:
            blocks["m"] = least.astype(np.float32)
    if "qh" in names:
        blocks["qh"] = ((codes >> 4) << np.arange(32)).sum(axis=2)
    low, high = codes[:, :, :16] % 16, codes[:, :, 16:] % 16
    blocks["qs"] = codes if format == "q8_0" else low + 16 * high
    return np.asarray(blocks.view(np.uint8).reshape(len(codes), -1))


def _values(codes: NDArray, scale: NDArray, least: NDArray, format: str) -> NDArray:
    """The values float32 [n, blocks, 32]. In float64 the product is exact, so the result is rounded at most once."""
    product = _worth(codes, format) * scale[:, :, None]
    values = product + least[:, :, None] if format in ("q4_1", "q5_1") else product
    return np.asarray(values, np.float32)


def _worth(codes: NDArray, format: str) -> NDArray:
    """The factors by which the scale is multiplied."""
    return TABLE[codes] if format == "iq4_nl" else codes - float(ZERO.get(format, 0))


def first_scale(rows: NDArray, format: str) -> NDArray:
    """The scale with which codes are computed, before rounding, float64 [n, blocks]."""
    x = split_groups(rows, BLOCK)
    if format in ("q4_1", "q5_1"):
        return np.asarray((x.max(axis=2) - x.min(axis=2)) / TOP[format])
    at = np.abs(x).argmax(axis=2)[:, :, None]
    signed = np.take_along_axis(x, at, axis=2)[:, :, 0] + 0.0  # + 0.0 changes -0 to 0
    divisor = {"q8_0": 127, "iq4_nl": -127}.get(format, -ZERO.get(format, 0))
    return np.asarray((np.abs(signed) if format == "q8_0" else signed) / divisor)


def any_code(rows: NDArray, format: str) -> NDArray:
    """Where any code is correct, bool [n, width]: d is stored as 0, so that all codes have the same value."""
    d = np.abs(round_to_float32(first_scale(rows, format)))
    of_zeros = np.abs(split_groups(rows, BLOCK)).max(axis=2) < np.float32(1e-15)
    free = of_zeros if format == "iq4_nl" else (d > 0) & (d < 2.0**-127)
    return np.repeat(free, BLOCK, axis=1)


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def store(rows: NDArray, format: str, chosen: NDArray | None = None) -> StoredRows:
    """Quantize rows. Stored.scale and .zero have been rounded to float16. `write` encodes the result as bytes.

    chosen: codes to use where any code is correct.
    """
    x = split_groups(rows, BLOCK)
    first = np.take_along_axis(x, x.argmin(axis=2, keepdims=True), axis=2)[:, :, 0]  # argmin: of 0 and -0, the first
    least = first if format in ("q4_1", "q5_1") else np.zeros(x.shape[:2])
    d = (
        round_to_float32(round_to_float32(x.max(axis=2) - least + 0.0) / TOP[format])
        if format in ("q4_1", "q5_1")
        else round_to_float32(first_scale(rows, format))
    )
    inverse = np.where(np.abs(d) >= 2.0**-127, round_to_float32(1 / d), 0)[:, :, None]
    if format == "iq4_nl":
        codes, d = _iq4(x, d, inverse)
    elif format == "q8_0":
        codes = round_half_away(round_to_float32(x * inverse)).astype(np.int64)
    elif format in ZERO:
        codes = np.clip(np.trunc(round_to_float32(round_to_float32(x * inverse) + (ZERO[format] + 0.5))), 0, TOP[format]).astype(
            np.int64
        )
    else:
        codes = np.clip(
            np.trunc(round_to_float32(round_to_float32(round_to_float32(x - least[:, :, None]) * inverse) + 0.5)), 0, TOP[format]
        ).astype(np.int64)
    if chosen is not None:
        codes = np.where(any_code(rows, format).reshape(codes.shape), np.reshape(chosen, codes.shape), codes)
    scale, least = (part.astype(np.float32).astype(np.float16).astype(np.float32) for part in (d, least))
    flat = np.shape(rows)
    values = _values(codes, scale.astype(np.float64), least.astype(np.float64), format)
    values = np.where(np.isfinite(scale + least)[:, :, None], values, np.float32(np.inf))
    return StoredRows(codes.reshape(flat), scale, least, values.reshape(flat))


def _iq4(x: NDArray, d: NDArray, inverse: NDArray) -> tuple[NDArray, NDArray]:
    """Codes and scales of IQ4_NL: the nearest value in the table (ties up), and the least-squares scale, weighted by x^2."""
    none = np.abs(x).max(axis=2) < np.float32(1e-15)
    first = np.where(none, round_to_float32(np.array(-1 / 127)), d)
    quotient = round_to_float32(x * round_to_float32(1 / first)[:, :, None])
    codes = np.zeros(x.shape, np.int64)
    for i in range(15):
        codes += round_to_float32(quotient - TABLE[i]) >= round_to_float32(TABLE[i + 1] - quotient)
    worth, weight = TABLE[codes], round_to_float32(x * x)
    upper, lower = np.zeros(d.shape), np.zeros(d.shape)
    for j in range(BLOCK):
        upper = round_to_float32(upper + round_to_float32(round_to_float32(weight[:, :, j] * worth[:, :, j]) * x[:, :, j]))
        lower = round_to_float32(lower + round_to_float32(round_to_float32(weight[:, :, j] * worth[:, :, j]) * worth[:, :, j]))
    return codes, np.where(none, 0.0, round_to_float32(upper / lower))


def fitted_scale(rows: NDArray) -> NDArray:
    """The scale of IQ4_NL before it is rounded to float16, float64 [n, blocks]. Blocks must not be near zero."""
    x, d = split_groups(rows, BLOCK), round_to_float32(first_scale(rows, "iq4_nl"))
    return _iq4(x, d, round_to_float32(1 / d)[:, :, None])[1]


def quotients(rows: NDArray, format: str) -> NDArray:
    """The quotients that codes represent, float64 [n, width]: x / d or (x - min) / d; 0 where d has no reciprocal."""
    x, d = split_groups(rows, BLOCK), first_scale(rows, format)[:, :, None]
    x = x - x.min(axis=2, keepdims=True) if format in ("q4_1", "q5_1") else x
    inverted = np.abs(d) >= (1e-15 / 127 if format == "iq4_nl" else 2.0**-127)
    return np.where(inverted, x / np.where(inverted, d, 1), 0).reshape(np.shape(rows))


def bound(rows: NDArray, want: StoredRows, format: str) -> NDArray:
    """The largest |x - value|, float64: half a step between codes, the clipped part, and the effect of rounded scales."""
    x, d = split_groups(rows, BLOCK), first_scale(rows, format)[:, :, None]
    worth = np.abs(_worth(want.codes, format).reshape(x.shape))
    s, m = (part[:, :, None].astype(np.float64) for part in (want.scale, want.zero))
    held = np.abs(d) * (127 if format == "iq4_nl" else 1) >= (1e-15 if format == "iq4_nl" else 2.0**-127) * (1 + 2 * U)
    if format in ("q4_1", "q5_1"):
        low = x.min(axis=2, keepdims=True)
        moved = worth * np.abs(d - s) + np.abs(low - m)
        rounding = 8 * U * (x - low + d) + moved + U * np.abs(worth * s + m) + 2.0**-149
        return np.asarray(d / 2 + rounding + np.where(held, 0, x - low)).reshape(np.shape(rows))
    most = {"q8_0": 127, "iq4_nl": 113}.get(format, TOP.get(format, 0) - ZERO.get(format, 0))
    widest = np.diff(TABLE).max() if format == "iq4_nl" else 1
    divisor = 127 if format in ("q8_0", "iq4_nl") else ZERO[format]
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = np.where(held, x / d, 0) - most
    half = np.abs(d) * np.maximum(widest / 2, beyond)
    rounding = 8 * U * (np.abs(x) + np.abs(d) * divisor) + worth * np.abs(d - s)
    return np.asarray(half + rounding + np.where(held, 0, np.abs(x))).reshape(np.shape(rows))


def exact_quotient(block: NDArray, i: int, format: str) -> Fraction:
    """The exact quotient that the code of number i of a block represents; see `quotients`."""
    x = [Fraction(float(each)) for each in block]
    largest = max(x, key=abs)
    if format in ("q4_1", "q5_1"):
        offset, d = x[i] - min(x), (max(x) - min(x)) / TOP[format]
    else:
        offset, d = x[i], {"q8_0": abs(largest) / 127, "iq4_nl": largest / -127}.get(format, largest / -ZERO.get(format, 1))
    return offset / d if abs(d) >= Fraction(2) ** -127 else Fraction(0)


def admits(code: int, quotient: Fraction, slack: Fraction, format: str) -> bool:
    """Whether a code is admissible for a quotient x / d, or (x - min) / d."""
    if format == "iq4_nl":
        near = sorted(abs(quotient - int(each)) for each in TABLE)
        return 0 <= code < 16 and abs(quotient - int(TABLE[code])) <= near[0] + 2 * slack
    zero, top = ZERO.get(format, 0), TOP.get(format, 127)
    within = min(max(quotient + zero, Fraction(-127 if format == "q8_0" else 0)), Fraction(top))
    return abs(within - code) <= Fraction(1, 2) + slack
