"""Attention in float64, a query head at a time, and how far float32 may lie from it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.expected import Arrays, Expected, Unjudged, Wrong, finite, not_finite, refuse, wrong_dtype
from kvref_conformance.oracle.rows import Reads

U = 2.0**-24
LARGE = 1e38  # float32 reaches further, by a factor of 3
EXP_ERROR = 8 * U  # a float32 exp within 4 units in the last place
# Of dtypes narrower than float32, half a unit in the last place of 1, half of the least number above 0, and the largest number.
NARROW = {"float16": (2.0**-11, 2.0**-25, 65504.0), "bfloat16": (2.0**-8, 2.0**-134, 255 * 2.0**120)}


def seen(query: int, window: int | None = None, sinks: int = 0, chunk: int = 0) -> NDArray:
    """The positions that a query at one of them sees, in order: one by one, as WIN-01, WIN-05 and WIN-07 say."""
    return np.array(
        [
            at
            for at in range(query + 1)
            if at < sinks or ((window is None or query - at < window) and (not chunk or at // chunk == query // chunk))
        ],
        np.int64,
    )


def attention(
    query: NDArray, keys: NDArray, values: NDArray, *, scale: float, causal: bool = False, views: Sequence[NDArray] | None = None,
    logit_sink: NDArray | None = None, rotated: bool = False, ranks: int = 1,
) -> tuple[NDArray, NDArray]:  # fmt: skip
    """The output and its bound, float64 [nq, query heads, D]: query [nq, Hq, D], keys and values [n, Hkv, D].

    Every rounding is counted once: D + 1 in a score, the subtraction of the largest, exp, 2n + 3 in the weighted mean; and for
    who merges pieces of 20 tokens or more that subtraction once more, and n. views: for each query the tokens that it sees.
    logit_sink: [Hq], a score without a value, in the sum as a token is. rotated: it may be over rotated keys and values, with a
    rotated query, and the output rotated back (FMT-ROT-07): no rotation changes an l2 norm, which stands for magnitudes
    therefore; both of the two in a score, and the output, may be off by D + 2 roundings. ranks: that each found what it has, and
    are merged then, however few tokens one has: 20 roundings more for each but the first (SHARD-02).
    """
    query, keys, values = (np.asarray(each, dtype=np.float64) for each in (query, keys, values))
    num_queries, num_heads, dim = query.shape
    group = num_heads // keys.shape[1]
    out = np.zeros((num_queries, num_heads, values.shape[2]))
    bound = np.zeros_like(out)
    for i in range(num_queries):
        count = len(keys) - num_queries + 1 + i if causal else len(keys)
        view: Any = views[i] if views is not None else slice(0, max(0, count))
        for head in range(num_heads if len(keys[view]) else 0):
            k, v, q = keys[view, head // group], values[view, head // group], query[i, head]
            score = scale * (k @ q)
            score_error = _gamma(dim + 1) * abs(scale) * (np.abs(k) @ np.abs(q))
            if rotated:
                score_error = 3 * _gamma(dim + 2) * abs(scale) * np.linalg.norm(k, axis=1) * np.linalg.norm(q)
            if logit_sink is not None and logit_sink[head] > -np.inf:
                score, score_error = np.append(score, np.float64(logit_sink[head])), np.append(score_error, 0.0)
                v = np.vstack([v, np.zeros(v.shape[1])])
            weight = np.exp(score - score.max())
            weight /= weight.sum()
            reach = (np.abs(score) + score_error).max()
            log_error = score_error.max() + 4 * U * reach + EXP_ERROR / (1 - EXP_ERROR)
            magnitude, back = np.abs(v), 0.0
            if rotated:
                magnitude, back = np.linalg.norm(v, axis=1, keepdims=True), _gamma(dim + 2)
            relative = math.exp(min(2 * log_error, 500)) * (1 + _gamma(3 * len(v) + 3 + 20 * (ranks - 1))) - 1
            out[i, head] = weight @ v
            tiny = 4 * len(v) * 2.0**-126 * np.abs(v).max(axis=0) + len(v) * 2.0**-126
            bound[i, head] = (relative + back) * (weight @ magnitude) + tiny
    return out, bound


def rounding(want: NDArray, bound: NDArray, dtype: str) -> NDArray:
    """How much further the output may lie from `want` where it is answered in a narrower dtype, that alone is taken: float64.

    What float32 computes lies within `bound`, so that its magnitude is |want| + bound at most, and is rounded once: to infinity
    where it is more than the dtype has.
    """
    relative, least, largest = NARROW.get(dtype, (0.0, 0.0, np.inf))
    magnitude = np.abs(np.asarray(want, dtype=np.float64)) + bound
    return np.where(magnitude > largest, np.inf, relative * magnitude + least)


def overflows(query: NDArray, keys: NDArray, values: NDArray, scale: float) -> bool:
    """Whether float32 scores may be infinite on their way, or a sum of values that is divided at the end."""
    q, k, v = (float(np.abs(part).max(initial=0)) for part in (np.asarray(query), keys, values))
    return bool(max(q * k * keys.shape[2] * max(1.0, abs(scale)), v * len(values)) > LARGE)


def _gamma(roundings: int) -> float:
    return roundings * U / (1 - roundings * U)


def wrong_query(query: NDArray, heads: int, dim: int) -> Wrong:
    """What is wrong with a query to a cache of so many kv heads."""
    shape = np.shape(query)
    fits = len(shape) == 3 and shape[2] == dim and shape[1] % heads == 0
    wrong: Wrong = [] if fits else [("ShapeMismatch", "LAW-10")]
    wrong += wrong_dtype(query)
    return wrong + not_finite(query) if wrong else []


def attended(
    clause: str, query: NDArray, keys: Reads, values: Reads, scale: float, views: Sequence[NDArray] | None = None, ranks: int = 1
) -> Expected:
    """What a cache's attention must be over what it reads as, on so many ranks that are merged.

    views: of those tokens, for each query, the ones that it sees.
    """
    heads, dim = keys.values.shape[1:]
    if wrong := wrong_query(query, heads, dim):
        return refuse(wrong, lambda: None)
    some = slice(None) if views is None else np.array(sorted({int(at) for view in views for at in view}), np.int64)
    if keys.slack.any() or values.slack.any() or not finite(query, keys.values[some], values.values[some]):
        return Unjudged(clause)  # what the cache reads as is not known to the bit
    if overflows(query, keys.values[some], values.values[some], scale):
        return Unjudged(clause)
    out, bound = attention(query, keys.values, values.values, scale=scale, views=views, ranks=ranks)
    return Arrays(clause, parts=(Reads(out.astype(np.float32), bound + U * np.abs(out)),), always_slack=True)
