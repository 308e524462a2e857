"""Attention of the last queries of a sequence, in float64; each query is computed separately, over its window."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.attention import attention


def window_attention(query: Any, keys: NDArray, values: NDArray, window: int | None, scale: float) -> tuple[NDArray, NDArray]:
    """Returns the output and its bound. keys, values: [n, heads, dim] of the last n positions, which include the queries' own."""
    outs, bounds = list[NDArray](), list[NDArray]()
    for index, one in enumerate(np.asarray(query)):
        stop = len(keys) - len(query) + index + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        out, bound = attention(one[None], keys[seen], values[seen], scale=scale)
        outs.append(out)
        bounds.append(bound)
    empty = np.zeros((0, *np.shape(query)[1:]))
    return np.concatenate([empty, *outs]), np.concatenate([empty, *bounds])
