"""Shared by the oracles of all formats: float32 arithmetic in float64, and the type of stored rows."""

from typing import NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray

U = 2.0**-24


class StoredRows(NamedTuple):
    """Rows in a format."""

    codes: NDArray  # one code per number, unpacked
    scale: NDArray  # float32 [n], or [n, groups]
    zero: NDArray  # the same shape; 0 in symmetric formats
    values: NDArray  # float32, the values of the codes


def split_groups(rows: NDArray, group: int) -> NDArray:
    """Split rows [n, width] into groups [n, groups, group], float64."""
    x = np.asarray(rows, dtype=np.float32).astype(np.float64)
    return x.reshape(len(x), x.shape[1] // group, group)


@np.errstate(over="ignore")
def round_to_float32(x: NDArray) -> NDArray:
    """Round to float32, and return float64. Numbers beyond the range of float32 become infinite."""
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def round_half_away(x: NDArray) -> NDArray:
    """Round to integers, halves away from zero. Exact, because x has float32 values."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)
