"""Attention over tokens that come some at a time, so that what a cache holds is never there as float32 as a whole.

Of the tokens that came, three numbers are kept for each query and head: the largest score m, the sum t of exp(score - m), and the
sum o of the values so weighted. Those of two pieces make those of both: with M the larger m, each t and o is multiplied by
exp(m - M), and they are added. In the end o / t is the attention (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018; Dao et al., "FlashAttention", 2022).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from kvref.array import Array, Namespace


@dataclass(frozen=True)
class Partial:
    """Attention over some tokens, not divided yet, by query and query head.

    largest and total float32 [num_kv_heads, group, num_queries, 1], values the same with value_dim; seen: whether a query sees
    any of the tokens, bool [num_queries, 1].
    """

    largest: Array
    total: Array
    values: Array
    seen: Array


def partial(query: Array, keys: Array, values: Array, scale: float, mask: Array, xp: Namespace) -> Partial:
    """Of one piece: query [nq, Hq, D], keys [n, Hkv, D], values [n, Hkv, Dv], bool mask [nq, n], as in `Backend.attend`."""
    if not bool(xp.all(mask)) and not _all_finite(keys, values, xp):
        seen = xp.nonzero(xp.any(mask, axis=0))[0]  # what no query sees has no effect, NaN included (ATTN-07)
        keys, values, mask = xp.take(keys, seen, axis=0), xp.take(values, seen, axis=0), xp.take(mask, seen, axis=1)
        if mask.shape[0] > 1 and not bool(xp.all(mask)) and not _all_finite(keys, values, xp):
            # Seen by some queries and not by others: 0 * NaN would reach the others.
            each = [partial(query[i : i + 1, ...], keys, values, scale, mask[i : i + 1, :], xp) for i in range(mask.shape[0])]
            parts = zip(*((one.largest, one.total, one.values) for one in each), strict=True)
            largest, total, mean = (xp.concat(list(part), axis=2) for part in parts)
            return Partial(largest, total, mean, xp.any(mask, axis=1)[:, None])
    num_queries, num_kv_heads = query.shape[0], keys.shape[1]
    grouped = xp.permute_dims(xp.reshape(query, (num_queries, num_kv_heads, -1, query.shape[2])), (1, 2, 0, 3))
    by_head = xp.reshape(grouped, (num_kv_heads, -1, query.shape[2]))  # a group's heads side by side: no key is repeated
    scores = xp.reshape(by_head @ xp.permute_dims(keys, (1, 2, 0)), (*grouped.shape[:3], keys.shape[0])) * scale
    scores = xp.where(mask, scores, -xp.inf)
    nothing = xp.full((*grouped.shape[:3], 1), -xp.inf, dtype=scores.dtype, device=scores.device)
    largest = xp.max(xp.concat([scores, nothing], axis=3), axis=3, keepdims=True)
    weights = xp.exp(scores - _finite(largest, xp))
    mean = xp.reshape(weights, (*by_head.shape[:2], -1)) @ xp.permute_dims(values, (1, 0, 2))
    mean = xp.reshape(mean, (*grouped.shape[:3], values.shape[2]))
    return Partial(largest, xp.sum(weights, axis=3, keepdims=True), mean, xp.any(mask, axis=1)[:, None])


def merged(partials: Iterable[Partial], logit_sink: Array | None, xp: Namespace) -> Array:
    """Attention over the tokens of all pieces, one at least: float32 [num_queries, num_query_heads, value_dim].

    Each is merged as it comes, and none is kept. logit_sink: float32 [num_query_heads], the score of a token without a value,
    which comes once (WIN-08).
    """
    whole = reduce(lambda one, other: _both(one, other, xp), partials)
    kv_heads, group, num_queries, value_dim = whole.values.shape
    if logit_sink is not None:
        score = xp.broadcast_to(xp.reshape(logit_sink, (kv_heads, group, 1, 1)), whole.largest.shape)
        whole = _both(whole, Partial(score, xp.ones_like(score), xp.zeros_like(whole.values), whole.seen), xp)
    # A query that sees no token gets zeros (ATTN-08), one whose scores are all -inf 0 / 0 (ATTN-03).
    out = xp.where(whole.seen, whole.values / xp.where(whole.seen, whole.total, xp.ones_like(whole.total)), 0.0)
    return xp.reshape(xp.permute_dims(out, (2, 0, 1, 3)), (num_queries, kv_heads * group, value_dim))


def _both(one: Partial, other: Partial, xp: Namespace) -> Partial:
    largest = xp.maximum(one.largest, other.largest)
    a, b = (xp.exp(each.largest - _finite(largest, xp)) for each in (one, other))
    values = a * one.values + b * other.values
    return Partial(largest, a * one.total + b * other.total, values, one.seen | other.seen)


def _finite(largest: Array, xp: Namespace) -> Array:
    """What is subtracted from scores: 0 where there is none above -inf, whose exponential is 0 then."""
    return xp.where(largest == -xp.inf, xp.zeros_like(largest), largest)


def _all_finite(keys: Array, values: Array, xp: Namespace) -> bool:
    return bool(xp.all(xp.isfinite(keys))) and bool(xp.all(xp.isfinite(values)))
