"""The Walsh-Hadamard transform by its matrix, and by its sums one after another (FMT-ROT).

The matrix is what a rotation means: entry (i, j) is (-1)^popcount(i & j), over the square root of n. The sums are what its bits
are: value i is that of i with one bit flipped, plus or minus itself, a bit after another from the lowest, each sum rounded.
"""

from fractions import Fraction
from functools import cache
from math import isqrt

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.formats import group_of, inner_of
from kvref_conformance.oracle.stored import Stored, U, fl

REACH = 2.0**126
LAST = {"q8_0": 127, "q4_0": 7, "int4_g32_float16": 7}  # codes: on the side of fewer; all with a float16 scale a group


def block_of(width: int) -> int:
    """The largest power of two that the width is a multiple of."""
    block = 1
    while width and width % (2 * block) == 0:
        block *= 2
    return block


@cache
def root(block: int) -> float:
    """The float32 nearest to 1 / sqrt(block), by whole numbers."""
    bits = block.bit_length() - 1
    if bits % 2 == 0:
        return float(2.0 ** -(bits // 2))
    digits = isqrt(2 << 46)  # of sqrt(2): 24 of them,
    digits += (2 * digits + 1) ** 2 < 8 << 46  # the last one rounded
    return float(digits * 2.0 ** (-23 - (bits + 1) // 2))


def turned(rows: NDArray) -> NDArray:
    """float32 [n, width], in blocks, sum by sum."""
    x = np.asarray(rows, np.float32).astype(np.float64)
    block, at = block_of(x.shape[-1]), np.arange(x.shape[-1])
    bit = 1
    while bit < block:
        with np.errstate(invalid="ignore"):
            x = fl(x[..., at ^ bit] + np.where(at & bit, -1.0, 1.0) * x)
        bit *= 2
    return (fl(x * root(block)) if block > 1 else x).astype(np.float32)


def exactly_turned(row: NDArray) -> list[Fraction]:
    """One row [width] by the matrix, without its division by the square root of the block: exact."""
    signs = signs_of(block_of(len(row)))
    x = np.array([int(Fraction(float(each)) * 2**149) for each in row], object)  # the least float32 goes into all of them
    return [Fraction(int(each), 2**149) for block in x.reshape(-1, len(signs)) for each in signs @ block]


@cache
def signs_of(block: int) -> NDArray:
    """Whole numbers of Python [block, block]: the matrix without its division."""
    return np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(block)] for i in range(block)], object)


def refused(rows: NDArray) -> NDArray:
    """bool [n]: rows whose sums might overflow (FMT-ROT-06)."""
    block, most = block_of(rows.shape[-1]), np.abs(np.asarray(rows, np.float64)).max(axis=-1, initial=0)
    return np.asarray((most * block > REACH) & (block > 1))


def of_blocks(x: NDArray, norm: int) -> NDArray:
    """float64, the shape of x: the l1 or l2 norm of the block that each number is in."""
    block = block_of(x.shape[-1])
    cut = np.asarray(x, np.float64).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return np.repeat(np.linalg.norm(cut, norm, axis=-1), block, axis=-1)


def bound(rows: NDArray, read: NDArray, off: NDArray) -> NDArray:
    """How far from `rows` what is rotated back may lie: read, off are the numbers in between, and how far those may be off."""
    block = block_of(rows.shape[-1])
    if block == 1:
        return off
    rounding = (1 + U) ** (block.bit_length() + 1) - 1
    norms = of_blocks(rows, 2) + of_blocks(read, 2)
    return np.asarray(of_blocks(off, 1) / block**0.5 + rounding * norms + block**0.5 * 2.0**-149)


def any_order(x: NDArray) -> NDArray:
    """How far what x [n, width] is turned into may lie from `turned` where sums are in another order: n + 2 roundings each."""
    block = block_of(x.shape[-1])
    roundings = (block + 2) * U * (block > 1)
    return np.asarray(roundings / (1 - roundings) * of_blocks(x, 2) + block**0.5 * 2.0**-149 * (block > 1))


def in_between(rows: NDArray, between: Stored, off: NDArray, format: str) -> NDArray:
    """How far what is stored at level tolerant may be worth from the rotated rows, float64 [n, width], of which `off` is said.

    Sums in another order move what is quantized by d, which is twice `any_order`: from what the definition gives, which is off as
    well. Its scale moves by no more than d, and what it is worth by no more than three times that. In groups the scale may
    besides be rounded to the float16 on the other side, a unit further: the code, `last` + 1 at most, counts as many of these,
    and one more where it is the next. And where two numbers of other signs are the largest by less than d, either may be what
    Q4_0 is scaled by, of whose codes -8 is the last on the one side, and 7 on the other: which end is cut off is open.
    """
    moved = 2 * any_order(rows)
    if (inner := inner_of(format)) in LAST:
        scale = np.repeat(np.abs(between.scale.astype(np.float64)), group_of(format), axis=1)
        cut_off = np.abs(turned(rows).astype(np.float64)) - LAST[inner] * scale
        off = np.maximum(off, cut_off) + (LAST[inner] + 2) * np.maximum(scale * 2.0**-10, 2.0**-24)
    return np.asarray(off + 3 * moved)


def tolerant(rows: NDArray, between: Stored, off: NDArray, format: str) -> NDArray:
    """How long what is off in each block may be, as l2 norm, with sums in any order, such as those of a product with the matrix.

    What is stored is off by e, |e_i| <= t_i (`in_between`), and so is its length, |e|_2 <= |t|_2. A matrix that is orthogonal
    keeps lengths: rotated back, e is as long, whatever its signs. Each value alone may be off by |t|_1 / sqrt(n), which is no
    more than that; but not all of them at once. Rotating back, each value is off by `any_order` of what is stored, which is no
    longer than |y|_2 + |t|_2, y being what the definition stores (twice, for the definition is off as well): n values by sqrt(n)
    times as much. A block's length is never less than one of its values, so that the bound is one for these, too.
    """
    block = block_of(rows.shape[-1])
    if block == 1:
        return off
    reach = in_between(rows, between, off, format)
    rounding = 2 * any_order(rows) + 2 * any_order(np.abs(between.values) + reach)
    return np.asarray(of_blocks(reach, 2) + block**0.5 * rounding)
