"""Keys that `remove` rotates by the positions that they move (EDIT-10), in float64, and the error bound of a cache."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import NARROW, U, output_rounding
from kvref_conformance.oracle.formats.per_row import ExpectedReads

ROTATION_ERROR = 3.01 * U  # of a number, relative to the length of its pair: the bound that `kvref.rope` derives
FLUSHED = 2.0**-124  # four numbers below the normal range of float32 that become 0
LARGEST = float(np.finfo(np.float32).max)
# By dtype: all larger magnitudes are rounded to infinity.
OVERFLOWS = {"float32": LARGEST * (1 + U)} | {name: largest * (1 + unit) for name, (unit, _, largest) in NARROW.items()}


def full_frequencies(dim: int, theta: float = 10_000.0) -> list[float]:
    """The frequencies of a rotary embedding over `dim` numbers, an even number."""
    return [theta ** (-2.0 * pair / dim) for pair in range(dim // 2)]


def rotated_keys(keys: NDArray, by: int, frequencies: Sequence[float], layout: str) -> tuple[NDArray, NDArray]:
    """Keys [..., head_dim] rotated by `by` positions in float64, and for each number the length of its pair, 0 if it has none."""
    count = len(frequencies)
    first = slice(0, count) if layout == "halves" else slice(0, 2 * count, 2)
    second = slice(count, 2 * count) if layout == "halves" else slice(1, 2 * count, 2)
    angles = by * np.array(frequencies, np.float64)
    cos, sin, wide = np.cos(angles), np.sin(angles), keys.astype(np.float64)
    want, length = wide.copy(), np.zeros(keys.shape)
    a, b = wide[..., first], wide[..., second]
    want[..., first], want[..., second] = a * cos - b * sin, b * cos + a * sin
    length[..., first] = length[..., second] = np.hypot(a, b)
    return want, length


def expected_rotation(keys: ExpectedReads, by: int, frequencies: Sequence[float], layout: str, dtype: str) -> ExpectedReads:
    """Keys of a cache in a plain dtype after a rotation.

    A slack of the keys is rotated too. The rotation adds its own error, and the result is rounded to the dtype once. A cache
    that rotates later, by the sum of several removals, rounds less often and is within the same bound.

    Where the dtype may overflow or a key is not finite, the slack is infinite; the value is infinite if the dtype must overflow.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        want, length = rotated_keys(keys.values, by, frequencies, layout)
        spread = rotated_keys(keys.slack, by, frequencies, layout)[1]
        error = spread + ROTATION_ERROR * (length + spread) + FLUSHED
        bound = error + output_rounding(want, error, dtype) + U * np.abs(want)
        known = np.isfinite(length) & (np.abs(want) + bound <= LARGEST)
        overflows = np.isfinite(length) & (np.abs(want) - error > OVERFLOWS[dtype])
        values = np.where(known, want, np.where(overflows, np.inf, 0)).astype(np.float32)
        slack = np.where(known, bound, np.inf)
        rotated = 2 * len(frequencies)  # later numbers are not rotated
        values[..., rotated:], slack[..., rotated:] = keys.values[..., rotated:], keys.slack[..., rotated:]
        return ExpectedReads(values, slack)
