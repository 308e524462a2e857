"""Attention over what a cache reads as: softmax(scale q k') v, per query head, with grouped key-value heads (GQA)."""

import math

from array_api_compat import array_namespace

from kvref.array import UNIT_ROUNDOFF as U
from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import PositionOutOfRange, ShapeMismatch, in_range
from kvref.inputs import accept

EXP_ERROR = 8 * U  # the premise about a library's float32 exp: within 4 units in the last place


def attention(
    query: Array,
    keys: Array,
    values: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    length: int | None = None,
    backend: Backend = reference,
) -> Array:
    """float32 [num_queries, num_query_heads, value_dim].

    query [num_queries, num_query_heads, head_dim]; keys [num_tokens, num_kv_heads, head_dim]; values [num_tokens, num_kv_heads,
    value_dim]. Query head h reads kv head h // (num_query_heads / num_kv_heads). scale: 1 / sqrt(head_dim) unless given. length:
    only the first `length` tokens count; what lies past them has no effect, NaN included (ATTN-07). causal: the queries are the
    last tokens of those, and each sees the tokens up to its own (ATTN-09). No tokens give zeros (ATTN-08).

    Raises ShapeMismatch, keys or values of no elements included, DtypeMismatch, or PositionOutOfRange for the length.
    """
    keys = accept("keys", keys, ("num_tokens", "num_kv_heads", "head_dim"), backend)
    num_tokens, num_kv_heads, head_dim = keys.shape
    if head_dim == 0:
        raise ShapeMismatch(f"keys: expected a head_dim of at least 1, got shape {list(keys.shape)}")
    values = accept("values", values, (num_tokens, num_kv_heads, "value_dim"), backend)
    if values.shape[2] == 0:
        raise ShapeMismatch(f"values: expected a value_dim of at least 1, got shape {list(values.shape)}")
    query = accept("query", query, ("num_queries", "num_query_heads", head_dim), backend)
    if num_kv_heads == 0 or query.shape[1] % num_kv_heads:
        raise ShapeMismatch(f"query: expected a multiple of {num_kv_heads} query heads, got {query.shape[1]}")
    length = num_tokens if length is None else length
    length = in_range(length, num_tokens + 1, PositionOutOfRange, "length")
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    return backend.attend(query, keys, values, scale, visible(query.shape[0], num_tokens, length, causal, backend))


def visible(num_queries: int, num_tokens: int, length: int, causal: bool, backend: Backend) -> Array:
    """bool [num_queries, num_tokens]: whether a query sees a token."""
    ends = [length - num_queries + 1 + i if causal else length for i in range(num_queries)]
    token = backend.asarray(list(range(num_tokens)), "int64")
    end = backend.asarray(ends, "int64")
    return token[None, :] < end[:, None]


def attention_bound(query: Array, keys: Array, values: Array, scale: float) -> Array:
    """How far float32 attention may lie from exact, at worst: float64, the output's shape, for one kv head and no mask.

    query [nq, D], keys [n, D], values [n, Dv], in float64. Whatever the order of summation:

    - a score carries D + 1 roundings: |s^ - s| <= g(D + 1) |scale| sum|q k|, g(k) = k u / (1 - k u);
    - subtracting the largest rounds once more, by at most u R, R = 2 (max|s| + that error); exp errs by EXP_ERROR;
    - so each weight is right to a factor e^(+-l), l = score error + u R + EXP_ERROR / (1 - EXP_ERROR), and the normalised
      weight to e^(+-2l); the sum of weights, the division, the products and the sum of values add 2n + 3 roundings.

    Hence |out^ - out| <= (e^(2l) (1 + g(2n + 3)) - 1) sum p|v|, and 2^-126 a weight where exp underflows.
    """
    xp = array_namespace(query)
    n, head_dim = keys.shape
    scores = query @ keys.mT * scale
    score_error = _gamma(head_dim + 1) * abs(scale) * (xp.abs(query) @ xp.abs(keys).mT)
    reach = xp.max(xp.abs(scores) + score_error, axis=-1, keepdims=True)
    log_error = xp.max(score_error, axis=-1, keepdims=True) + 2 * U * reach + EXP_ERROR / (1 - EXP_ERROR)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    relative = xp.exp(2 * log_error) * (1 + _gamma(2 * n + 3)) - 1
    underflow = 2 * n * 2.0**-126 * xp.max(xp.abs(values), axis=0, keepdims=True) + n * 2.0**-126
    return relative * (weights @ xp.abs(values)) + underflow


def _gamma(roundings: int) -> float:
    return roundings * U / (1 - roundings * U)
