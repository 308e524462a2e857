"""Attention in tiles: partial attention over some of the tokens, and merging of partial results.

The partial result of a tile is, for each query and head, the largest score m, the sum t of exp(score - m), and the sum o of
exp(score - m) * value. To merge two tiles, let M be the larger m. Each t and o is multiplied by exp(m - M), and the products are
added. After all tiles, o / t is the attention (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et
al., "FlashAttention", 2022). The whole context is thus never in memory as float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from kvref.array import Array, Namespace


@dataclass(frozen=True)
class Partial:
    """The partial result of a tile, by kv head, query head in its group, and query.

    - `largest`, `total`: m and t, float32 [num_kv_heads, group, num_queries, 1].
    - `values`: o, float32 [num_kv_heads, group, num_queries, value_dim], not divided by t.
    - `seen`: whether the query sees any token of the tile, bool [num_queries, 1].
    """

    largest: Array
    total: Array
    values: Array
    seen: Array


def partial(query: Array, keys: Array, values: Array, scale: float, mask: Array, xp: Namespace) -> Partial:
    """Return the partial attention over one tile.

    query [nq, Hq, D], keys [n, Hkv, D], values [n, Hkv, Dv] and mask, bool [nq, n], are those of `Backend.attend`.
    """
    if not bool(xp.all(mask)) and not _all_finite(keys, values, xp):
        seen = xp.nonzero(xp.any(mask, axis=0))[0]  # tokens that no query sees have no effect, even NaN (ATTN-07)
        keys, values, mask = xp.take(keys, seen, axis=0), xp.take(values, seen, axis=0), xp.take(mask, seen, axis=1)
        if mask.shape[0] > 1 and not bool(xp.all(mask)) and not _all_finite(keys, values, xp):
            # Some queries see the NaN and others do not: 0 * NaN would affect the others.
            each = [partial(query[i : i + 1, ...], keys, values, scale, mask[i : i + 1, :], xp) for i in range(mask.shape[0])]
            parts = zip(*((one.largest, one.total, one.values) for one in each), strict=True)
            largest, total, mean = (xp.concat(list(part), axis=2) for part in parts)
            return Partial(largest, total, mean, xp.any(mask, axis=1)[:, None])
    num_queries, num_kv_heads = query.shape[0], keys.shape[1]
    grouped = xp.permute_dims(xp.reshape(query, (num_queries, num_kv_heads, -1, query.shape[2])), (1, 2, 0, 3))
    by_head = xp.reshape(grouped, (num_kv_heads, -1, query.shape[2]))  # per kv head one matrix: no key is repeated
    scores = xp.reshape(by_head @ xp.permute_dims(keys, (1, 2, 0)), (*grouped.shape[:3], keys.shape[0])) * scale
    scores = xp.where(mask, scores, -xp.inf)
    nothing = xp.full((*grouped.shape[:3], 1), -xp.inf, dtype=scores.dtype, device=scores.device)
    largest = xp.max(xp.concat([scores, nothing], axis=3), axis=3, keepdims=True)
    weights = xp.exp(scores - _finite(largest, xp))
    mean = xp.reshape(weights, (*by_head.shape[:2], -1)) @ xp.permute_dims(values, (1, 0, 2))
    mean = xp.reshape(mean, (*grouped.shape[:3], values.shape[2]))
    return Partial(largest, xp.sum(weights, axis=3, keepdims=True), mean, xp.any(mask, axis=1)[:, None])


def merged(partials: Iterable[Partial], logit_sink: Array | None, xp: Namespace) -> Array:
    """Return the attention over all tiles, at least one: float32 [num_queries, num_query_heads, value_dim].

    partials: can be a generator; each partial result is merged as soon as it is computed. logit_sink: float32 [num_query_heads],
    the score of a token without a value, which is added once (WIN-08).
    """
    whole = reduce(lambda one, other: _both(one, other, xp), partials)
    kv_heads, group, num_queries, value_dim = whole.values.shape
    if logit_sink is not None:
        score = xp.broadcast_to(xp.reshape(logit_sink, (kv_heads, group, 1, 1)), whole.largest.shape)
        whole = _both(whole, Partial(score, xp.ones_like(score), xp.zeros_like(whole.values), whole.seen), xp)
    # A query that sees no token gets zeros (ATTN-08). If all its scores are -inf, the result is 0 / 0, NaN (ATTN-03).
    out = xp.where(whole.seen, whole.values / xp.where(whole.seen, whole.total, xp.ones_like(whole.total)), 0.0)
    return xp.reshape(xp.permute_dims(out, (2, 0, 1, 3)), (num_queries, kv_heads * group, value_dim))


def _both(one: Partial, other: Partial, xp: Namespace) -> Partial:
    """The partial result of two tiles together."""
    largest = xp.maximum(one.largest, other.largest)
    a, b = (xp.exp(each.largest - _finite(largest, xp)) for each in (one, other))
    values = a * one.values + b * other.values
    return Partial(largest, a * one.total + b * other.total, values, one.seen | other.seen)


def _finite(largest: Array, xp: Namespace) -> Array:
    """The numbers to subtract from scores: `largest`, and 0 if it is -inf, because -inf - -inf is NaN."""
    return xp.where(largest == -xp.inf, xp.zeros_like(largest), largest)


def _all_finite(keys: Array, values: Array, xp: Namespace) -> bool:
    return bool(xp.all(xp.isfinite(keys))) and bool(xp.all(xp.isfinite(values)))
