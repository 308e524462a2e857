"""Attention in functions that NumPy and CuPy both have."""

from typing import Any

from kvref.array import Array


def grouped_attention(
    library: Any, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None
) -> Array:
    """`Backend.attend`. library: numpy or cupy."""
    if not mask.all() and not all_finite(library, keys, values):
        seen = mask.any(axis=0)
        keys, values, mask = keys[seen], values[seen], mask[:, seen]
        if not all_finite(library, keys, values) and not mask.all():
            # Some queries see a token that is not finite and others do not: 0 * NaN would affect the others.
            each = [
                grouped_attention(library, query[i : i + 1], keys[sees], values[sees], scale, mask[i : i + 1, sees], logit_sink)
                for i, sees in enumerate(mask)
            ]
            return library.concatenate(each)
    num_queries, num_query_heads, head_dim = query.shape
    num_tokens, num_kv_heads, value_dim = values.shape
    if num_tokens == 0 or num_queries == 0:
        return library.zeros((num_queries, num_query_heads, value_dim), library.float32)
    # [kv heads, group * queries, D] @ [kv heads, D, tokens], with the query heads of a group concatenated.
    grouped = query.reshape(num_queries, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores = grouped.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2, 0)
    scores *= library.float32(scale)
    scores = library.where(mask, scores.reshape(num_kv_heads, -1, num_queries, num_tokens), library.float32(-library.inf))
    sees_some = mask.any(axis=1)[:, None]  # no token: zeros (ATTN-08); all scores -inf: NaN (ATTN-03)
    largest = scores.max(axis=-1, keepdims=True)
    if logit_sink is not None:
        sink = logit_sink.reshape(num_kv_heads, -1, 1, 1)
        largest = library.maximum(largest, sink)
    largest = library.where(sees_some, largest, library.float32(0))
    weights = library.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if logit_sink is not None:
        total = total + library.exp(sink - largest)
    weights /= library.where(sees_some, total, library.float32(1))
    out = weights.reshape(num_kv_heads, -1, num_tokens) @ values.transpose(1, 0, 2)
    out = out.reshape(num_kv_heads, -1, num_queries, value_dim).transpose(2, 0, 1, 3)
    return library.ascontiguousarray(out.reshape(num_queries, num_query_heads, value_dim))


def all_finite(library: Any, *arrays: Array) -> bool:
    """Whether every number of every array is finite."""
    return all(bool(library.isfinite(array).all()) for array in arrays)
