"""Attention of a sequence's last queries, in float64: each over the window that it sees, by itself."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.attention import attention


def window_attention(query: Any, keys: NDArray, values: NDArray, window: int | None, scale: float) -> tuple[NDArray, NDArray]:
    """The output and its bound: keys and values [n, heads, dim] of the last n positions, the queries' own among them."""
    outs, bounds = list[NDArray](), list[NDArray]()
    for index, one in enumerate(np.asarray(query)):
        stop = len(keys) - len(query) + index + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        out, bound = attention(one[None], keys[seen], values[seen], scale=scale)
        outs.append(out)
        bounds.append(bound)
    empty = np.zeros((0, *np.shape(query)[1:]))
    return np.concatenate([empty, *outs]), np.concatenate([empty, *bounds])
