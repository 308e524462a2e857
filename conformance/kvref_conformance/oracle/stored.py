"""What the oracles of all formats share: float32 arithmetic in float64, and what a row is stored as."""

from typing import NamedTuple

import numpy as np

from kvref_conformance.arrays import NDArray

U = 2.0**-24


class Stored(NamedTuple):
    codes: NDArray  # one code an element, unpacked
    scale: NDArray  # float32 [n], or [n, groups]
    zero: NDArray  # as scale, zeros in symmetric formats
    values: NDArray  # float32, what it reads as


def cut(rows: NDArray, group: int) -> NDArray:
    """Rows [n, width] as groups [n, groups, group], float64."""
    x = np.asarray(rows, dtype=np.float32).astype(np.float64)
    return x.reshape(len(x), x.shape[1] // group, group)


@np.errstate(over="ignore")
def fl(x: NDArray) -> NDArray:
    """Rounded to float32, as float64: what passes its end is infinite."""
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def half_away(x: NDArray) -> NDArray:
    """Halves away from zero; exact, since x is a float32 held in float64."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)
