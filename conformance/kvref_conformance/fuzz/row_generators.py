"""The rows that state machines append: all tokens differ, and some contain numbers that are difficult to store."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.small_floats import MAX, round_to

EDGE_VALUES = {  # the numbers that fill a row, repeated
    "zeros": (0.0, -0.0),
    "tiny": (1e-40, -3e-45, 2.0**-126),
    "ties": (127.0, 0.5, -1.5, 62.5, -126.5),
    "float16 edges": (65504.0, -65519.0, 2.0**-24, 2.0**-25),
    "beyond float16": (65520.0, 1e6),
    "huge": (1e38, -1e38),
    "rounded up": (2.0**127 * (1 - 2.0**-10), -(2.0**127) * (1 - 2.0**-10)),  # in bfloat16, their difference overflows
    "largest": (np.finfo(np.float32).max, 1.0),
    "nan": (1.0, np.nan),
    "infinity": (np.inf, 1.0),
}
PLAIN_KINDS = ("counting", "uneven")
HUGE_KINDS = ("huge", "rounded up", "largest")  # rows that must not be scaled up, because they would overflow
FINITE_KINDS = (*PLAIN_KINDS, *PLAIN_KINDS, "zeros", "tiny", "ties", "float16 edges", "beyond float16", *HUGE_KINDS)


def row_kinds(everything: bool = True) -> st.SearchStrategy[str]:
    """The kinds of rows. A failure shrinks to the first. everything: with NaN and infinity."""
    return st.sampled_from((*FINITE_KINDS, "nan", "infinity") if everything else FINITE_KINDS)


class RowSource:
    """Makes rows, and counts its numbers so that no two tokens are equal. All numbers are exact in `dtype`."""

    def __init__(self, dtype: str = "float32") -> None:
        self.num_made, self.dtype = 0, dtype

    def rows(self, shape: tuple[int, ...], kind: str) -> NDArray:
        """float32 rows of any shape."""
        size, start = prod(shape), self.num_made
        self.num_made += size
        if kind == "counting":
            values = np.arange(start + 1, start + size + 1, dtype=np.float64)
        elif kind == "uneven":
            values = np.random.default_rng(start).normal(size=size) * 2.0 ** (start % 9 - 4)
        else:
            edges = np.array(EDGE_VALUES[kind])
            values = edges[np.arange(start, start + size) % len(edges)]
        return self.round_to_dtype(values.astype(np.float32)).reshape(shape)

    def round_to_dtype(self, values: NDArray) -> NDArray:
        """Round to numbers that are exact in the dtype. Finite numbers that are too large become its largest."""
        if self.dtype == "float32":
            return values
        largest = MAX[self.dtype]
        return round_to(np.where(np.isfinite(values), np.clip(values, -largest, largest), values), self.dtype)

    def wrong_pair(self, shape: tuple[int, ...], wrong: int, side: int) -> tuple[NDArray, NDArray]:
        """Keys and values of which one or both have a wrong shape or dtype."""
        bad, good = self._wrong(shape, wrong), self.rows(shape, "counting")
        return ((bad, bad), (good, bad), (bad, good))[side]

    def _wrong(self, shape: tuple[int, ...], which: int) -> NDArray:
        turned = (
            (*shape[:-1], shape[-1] + 1), (*shape[:-2], shape[-2] + 1, shape[-1]), shape[:-1], (1, *shape), (*shape[:-1], 0),
        )[which % 6 - 1] if which % 6 else shape  # fmt: skip
        rows = self.rows(turned, "counting")
        return rows if which % 6 else rows.astype(np.float64)  # the right shape, but float64
