"""Attention in float64, one query head at a time, and the error bound of float32 (ATTN-04)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    Errors,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    all_finite,
    dtype_errors,
    expect_error,
    finite_errors,
)
from kvref_conformance.oracle.formats.per_row import ExpectedReads

U = 2.0**-24
MAX_MAGNITUDE = 1e38  # a third of the largest float32
EXP_ERROR = 8 * U  # the relative error of a float32 exp that is accurate to 4 units in the last place
# Of dtypes narrower than float32: half a unit in the last place of 1, half of the least number above 0, and the largest number.
NARROW = {"float16": (2.0**-11, 2.0**-25, 65504.0), "bfloat16": (2.0**-8, 2.0**-134, 255 * 2.0**120)}


def visible_positions(query: int, window: int | None = None, sinks: int = 0, chunk: int = 0) -> NDArray:
    """The positions that the query at position `query` sees, in order: the definitions of WIN-01, WIN-05 and WIN-07."""
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
    """The output and its error bound, float64 [nq, Hq, D], for query [nq, Hq, D], keys and values [n, Hkv, D].

    The bound counts each rounding: D + 1 in a score, the subtraction of the largest score, exp, and 2n + 3 in the weighted mean.
    It also covers implementations that merge tiles of at least 20 tokens, which add another subtraction and n roundings.

    views: the positions that each query sees. logit_sink: [Hq], a score without a value, which is part of the softmax sum.
    rotated: whether keys, values and query may be rotated, and the output rotated back (FMT-ROT-07). Rotation preserves the l2
    norm, so norms replace magnitudes; key and query in a score, and the output, have D + 2 more roundings each. ranks: the number
    of ranks whose results are merged, even if one has few tokens: 20 more roundings for each rank after the first (SHARD-02).
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


def output_rounding(want: NDArray, bound: NDArray, dtype: str) -> NDArray:
    """The additional error of an output that is returned in a narrower dtype, float64.

    The float32 result is within `bound`, so its magnitude is at most |want| + bound. It is rounded once, to infinity if it is
    beyond the range of the dtype.
    """
    relative, least, largest = NARROW.get(dtype, (0.0, 0.0, np.inf))
    magnitude = np.abs(np.asarray(want, dtype=np.float64)) + bound
    return np.where(magnitude > largest, np.inf, relative * magnitude + least)


def weight_rounding(query: NDArray, keys: NDArray, values: NDArray, dtype: str, **options: Any) -> NDArray:
    """The additional error of weights that are rounded to a narrower dtype before they are multiplied by values, float64.

    The kernel rounds exp(score - largest) of each token, or this divided by the sum. Either is at most 1, and the sum at least 1.
    With u half a unit in the last place of 1, and e half of the least number, the error is at most u sum(p |v|) + e sum(|v|).
    options: those of `attention`.
    """
    if dtype not in NARROW:
        return np.zeros(1)
    relative, least, _ = NARROW[dtype]
    magnitude = np.abs(np.asarray(values, dtype=np.float64))
    if options.get("rotated"):
        magnitude = np.broadcast_to(np.linalg.norm(magnitude, axis=-1, keepdims=True), magnitude.shape)
    weighted, bound = attention(query, keys, magnitude, **options)
    sums = np.where(np.isfinite(magnitude), magnitude, 0.0).sum(axis=0)
    return relative * (weighted + bound) + least * np.repeat(sums, np.shape(query)[1] // len(sums), axis=0)


def may_overflow(query: NDArray, keys: NDArray, values: NDArray, scale: float) -> bool:
    """Whether float32 may overflow in scores, or in a sum of values that is divided at the end."""
    q, k, v = (float(np.abs(part).max(initial=0)) for part in (np.asarray(query), keys, values))
    return bool(max(q * k * keys.shape[2] * max(1.0, abs(scale)), v * len(values)) > MAX_MAGNITUDE)


def _gamma(roundings: int) -> float:
    return roundings * U / (1 - roundings * U)


def query_errors(query: NDArray, heads: int, dim: int) -> Errors:
    """The errors for a query to a cache with `heads` kv heads and head_dim `dim`."""
    shape = np.shape(query)
    fits = len(shape) == 3 and shape[2] == dim and shape[1] % heads == 0
    wrong: Errors = [] if fits else [("ShapeMismatch", "LAW-10")]
    wrong += dtype_errors(query)
    return wrong + finite_errors(query) if wrong else []


def other_convention(
    query: NDArray, keys: NDArray, values: NDArray, got: NDArray, *, scale: float, views: Sequence[NDArray] | None = None,
    causal: bool = False, **options: Any,
) -> str:  # fmt: skip
    """A note if a wrong output `got` is right by another convention, such as " (right if attention is not causal)", or "".

    The other arguments are those of `attention`, by which the output is wrong.
    """
    count, length = len(query), len(keys)
    last = [np.arange(max(0, length - count + 1 + row)) for row in range(count)]
    own = {"views": views if views is not None else last if causal else [np.arange(length)] * count, "scale": scale}
    first = [np.arange(min(row + 1, length)) for row in range(count)]
    conventions: dict[str, tuple[dict[str, Any], int]] = {
        "attention is causal, with the queries of the last tokens": ({"views": last}, 1),
        "attention is causal, with the queries of the first tokens": ({"views": first}, 1),
        "attention is not causal": ({"views": [np.arange(length)] * count}, 1),
        "the queries are in reverse order": ({}, -1),
        "the scale is 1": ({"scale": 1.0}, 1),
        "the scale is 1 / sqrt(head_dim)": ({"scale": np.shape(query)[2] ** -0.5}, 1),
    }
    for convention, (changes, step) in conventions.items():
        out, bound = (part[::step] for part in attention(query, keys, values, **own | changes | options))
        bound = bound + output_rounding(out, bound, got.dtype.name) + U * np.abs(out)
        if got.shape == out.shape and (np.abs(got.astype(np.float64) - out) <= bound).all():
            return f" (right if {convention})"
    return ""


def expect_attend(
    clause: str,
    query: NDArray,
    keys: ExpectedReads,
    values: ExpectedReads,
    scale: float,
    views: Sequence[NDArray] | None = None,
    ranks: int = 1,
) -> Expectation:
    """The expected reply of a cache's `attend`. keys, values: what the cache reads as. ranks: the number of merged ranks.

    views: the positions that each query sees. Returns UnjudgedReply if values are not known to the bit, not finite, or could
    overflow.
    """
    heads, dim = keys.values.shape[1:]
    if wrong := query_errors(query, heads, dim):
        return expect_error(wrong, lambda: None)
    some = slice(None) if views is None else np.array(sorted({int(at) for view in views for at in view}), np.int64)
    if keys.slack.any() or values.slack.any() or not all_finite(query, keys.values[some], values.values[some]):
        return UnjudgedReply(clause)
    if may_overflow(query, keys.values[some], values.values[some], scale):
        return UnjudgedReply(clause)
    out, bound = attention(query, keys.values, values.values, scale=scale, views=views, ranks=ranks)
    return ExpectedArrays(
        clause,
        parts=(ExpectedReads(out.astype(np.float32), bound + U * np.abs(out)),),
        always_slack=True,
        weight_slack=lambda dtype: weight_rounding(
            query, keys.values, values.values, dtype, scale=scale, views=views, ranks=ranks
        ),
        explain=partial(other_convention, query, keys.values, values.values, scale=scale, views=views, ranks=ranks),
    )
