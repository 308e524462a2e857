"""The Walsh-Hadamard transform (FMT-ROT), by its matrix and by butterfly sums.

The matrix is the definition of the rotation: entry (i, j) is (-1)^popcount(i & j) / sqrt(n). The butterfly sums determine its
bits: for each bit of the index, from the lowest, value i becomes the value at i with that bit flipped, plus (bit 0) or minus
(bit 1) value i. Each sum is rounded.
"""

from fractions import Fraction
from functools import cache
from math import isqrt

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import group_of, inner_of
from kvref_conformance.oracle.formats.stored_rows import StoredRows, U, round_to_float32

MAX_MAGNITUDE = 2.0**126  # the largest magnitude of a block times its size (FMT-ROT-06)
MAX_CODE = {
    "q8_0": 127,
    "q4_0": 7,
    "int4_g32_float16": 7,
}  # the last code on the side with fewer codes, for float16 scales per group


def block_of(width: int) -> int:
    """The largest power of two that divides the width."""
    block = 1
    while width and width % (2 * block) == 0:
        block *= 2
    return block


@cache
def inverse_root(block: int) -> float:
    """The float32 nearest to 1 / sqrt(block), computed with integers."""
    bits = block.bit_length() - 1
    if bits % 2 == 0:
        return float(2.0 ** -(bits // 2))
    digits = isqrt(2 << 46)  # 24 bits of sqrt(2),
    digits += (2 * digits + 1) ** 2 < 8 << 46  # correctly rounded
    return float(digits * 2.0 ** (-23 - (bits + 1) // 2))


def rotate_rows(rows: NDArray) -> NDArray:
    """Rotate rows by butterfly sums in blocks, float32 [n, width]."""
    x = np.asarray(rows, np.float32).astype(np.float64)
    block, at = block_of(x.shape[-1]), np.arange(x.shape[-1])
    bit = 1
    while bit < block:
        with np.errstate(invalid="ignore"):
            x = round_to_float32(x[..., at ^ bit] + np.where(at & bit, -1.0, 1.0) * x)
        bit *= 2
    return (round_to_float32(x * inverse_root(block)) if block > 1 else x).astype(np.float32)


def rotate_exactly(row: NDArray) -> list[Fraction]:
    """Rotate one row [width] by the matrix, exactly, without the division by sqrt(block)."""
    signs = signs_of(block_of(len(row)))
    x = np.array([int(Fraction(float(each)) * 2**149) for each in row], object)  # every float32 is a multiple of 2^-149
    return [Fraction(int(each), 2**149) for block in x.reshape(-1, len(signs)) for each in signs @ block]


@cache
def signs_of(block: int) -> NDArray:
    """The matrix without the division, Python integers [block, block]."""
    return np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(block)] for i in range(block)], object)


def may_overflow(rows: NDArray) -> NDArray:
    """Rows whose sums might overflow, bool [n] (FMT-ROT-06)."""
    block, most = block_of(rows.shape[-1]), np.abs(np.asarray(rows, np.float64)).max(axis=-1, initial=0)
    return np.asarray((most * block > MAX_MAGNITUDE) & (block > 1))


def block_norms(x: NDArray, norm: int) -> NDArray:
    """For each number, the norm of its block, float64, in the shape of x. norm: 1 (l1) or 2 (l2)."""
    block = block_of(x.shape[-1])
    cut = np.asarray(x, np.float64).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return np.repeat(np.linalg.norm(cut, norm, axis=-1), block, axis=-1)


def bound(rows: NDArray, read: NDArray, off: NDArray) -> NDArray:
    """The largest error of values that are rotated back. read: the values before that; off: their largest errors."""
    block = block_of(rows.shape[-1])
    if block == 1:
        return off
    rounding = (1 + U) ** (block.bit_length() + 1) - 1
    norms = block_norms(rows, 2) + block_norms(read, 2)
    return np.asarray(block_norms(off, 1) / block**0.5 + rounding * norms + block**0.5 * 2.0**-149)


def summation_error(x: NDArray) -> NDArray:
    """The largest difference from `rotate_rows` if sums are added in another order, with n + 2 roundings per number."""
    block = block_of(x.shape[-1])
    roundings = (block + 2) * U * (block > 1)
    return np.asarray(roundings / (1 - roundings) * block_norms(x, 2) + block**0.5 * 2.0**-149 * (block > 1))


def stored_tolerance(rows: NDArray, between: StoredRows, off: NDArray, format: str) -> NDArray:
    """The largest difference at level tolerant between stored values and rotated rows, float64 [n, width].

    off: the tolerant bound of the inner format. Sums in another order change the rotated row by at most d = 2 * `summation_error`
    (once for the implementation, once for the definition). The scale changes by at most d, and a value by at most 3 d. In formats
    with groups, the scale may also be rounded to the next float16; that changes a value by at most `MAX_CODE` + 1 units, and by
    one more unit if the code changes too. If the two largest magnitudes have different signs and differ by less than d, Q4_0 may
    be scaled by either of them; as its codes range from -8 to 7, the value on either side may be clipped.
    """
    moved = 2 * summation_error(rows)
    if (inner := inner_of(format)) in MAX_CODE:
        scale = np.repeat(np.abs(between.scale.astype(np.float64)), group_of(format), axis=1)
        cut_off = np.abs(rotate_rows(rows).astype(np.float64)) - MAX_CODE[inner] * scale
        off = np.maximum(off, cut_off) + (MAX_CODE[inner] + 2) * np.maximum(scale * 2.0**-10, 2.0**-24)
    return np.asarray(off + 3 * moved)


def read_tolerance(rows: NDArray, between: StoredRows, off: NDArray, format: str) -> NDArray:
    """The largest l2 norm of the errors of each block, with sums in any order, such as those of a matrix product.

    The stored values have errors e with |e_i| <= t_i (`stored_tolerance`), so |e|_2 <= |t|_2. The matrix is orthogonal and
    preserves the l2 norm, so the errors have the same norm after rotating back. Rotating back adds an error of at most
    `summation_error` per value, of a row whose norm is at most |y|_2 + |t|_2, where y are the values that the definition stores.
    It counts twice (for the implementation and for the definition), and times sqrt(n) for the norm of n values. The norm of a
    block is at least the magnitude of each of its values, so the result is also a bound for each value.
    """
    block = block_of(rows.shape[-1])
    if block == 1:
        return off
    reach = stored_tolerance(rows, between, off, format)
    rounding = 2 * summation_error(rows) + 2 * summation_error(np.abs(between.values) + reach)
    return np.asarray(block_norms(reach, 2) + block**0.5 * rounding)
