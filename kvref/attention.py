"""Attention functions, views (windows, chunks and sink tokens), and the error bound of float32 attention.

Attention is softmax(scale q k') v per query head. Several query heads can read one kv head (grouped-query attention, GQA).

Caches attend through `attended`, which reads some tokens at a time, so that a long quantized context is never in memory as
float32. Many queries are processed in chunks of PIECE for the same reason: the mask of a chunk is [PIECE, tokens] at most.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from kvref.array import UNIT_ROUNDOFF as U
from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import PositionOutOfRange, ShapeMismatch, in_range, whole_fields
from kvref.online_softmax import merged, partial
from kvref.validation import accept

EXP_ERROR = 8 * U  # assumed relative error of a library's float32 exp: 4 units in the last place
LONGEST = 2**62  # windows are limited to it, so that positions minus windows do not overflow int64
TOKENS = 512  # tokens that are read at a time: a few megabytes as float32
PIECE = 256  # queries per chunk: the mask [PIECE, tokens that any of them sees] stays small for prompts of any length

# A function (start, stop) -> keys and values of the tokens [start, stop), float32 [stop - start, num_kv_heads, width] each.
Read: TypeAlias = Callable[[int, int], tuple[Array, Array]]


@dataclass(frozen=True)
class Sight:
    """The view of a query: which tokens it sees, by position. A query has the position of its own token.

    A query at position q sees the tokens at positions p <= q

    - that are among the last `window`, q included: p > q - window (WIN-01); None means no window;
    - and, if `chunk` is not 0, in the same chunk of `chunk` positions: p >= q // chunk * chunk (WIN-07);
    - and in addition those among the first `sinks` tokens of the sequence (WIN-05).

    Raises ConfigError unless `window` is None or an integer of at least 1, and `sinks` and `chunk` are integers of at least 0.
    """

    window: int | None = None
    sinks: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.window is not None:
            whole_fields(self, "window")
        whole_fields(self, "sinks", "chunk", minimum=0)

    def sees(self, query: Any, token: Any) -> Any:
        """Return whether a query at position `query` sees the token at position `token`. Arrays broadcast."""
        return (token <= query) & ((token >= self.first(query)) | (token < self.sinks))

    def first(self, query: Any) -> Any:
        """Return the first position that a query at position `query` sees, sink tokens aside. It can be negative."""
        query = np.int64(query)  # signed: subtracting from an unsigned integer would wrap around
        first = 0 * query if self.window is None else query - min(self.window, LONGEST) + 1
        return np.maximum(first, query // self.chunk * self.chunk) if self.chunk else first


def attention(
    query: Array,
    keys: Array,
    values: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    length: int | None = None,
    sight: Sight = Sight(),
    logit_sink: Array | None = None,
    backend: Backend = reference,
) -> Array:
    """Return softmax(scale q k') v for each query: float32 [num_queries, num_query_heads, value_dim] (chapter ATTN).

    - `query`: [num_queries, num_query_heads, head_dim]. Query head h reads kv head h // (num_query_heads / num_kv_heads).
    - `keys`: [num_tokens, num_kv_heads, head_dim]. `values`: [num_tokens, num_kv_heads, value_dim]. Inputs are float32, float16
      or bfloat16.
    - `scale`: 1 / sqrt(head_dim) by default.
    - `length`: the number of tokens that count, num_tokens by default. Later tokens have no effect, even if they contain NaN
      (ATTN-07).
    - `causal`: the queries are those of the last of these tokens, and each sees the tokens up to its own (ATTN-09). Otherwise
      every query has the position of the last token.
    - `sight`: restricts which of these tokens a query sees (WIN). A query that sees no token gets zeros (ATTN-08).
    - `logit_sink`: float32 [num_query_heads], per query head the score of a token without a value (WIN-08).

    Raises ShapeMismatch (also if head_dim or value_dim is 0), DtypeMismatch, or PositionOutOfRange if `length` is not in
    `[0, num_tokens + 1)`.
    """
    keys = accept("keys", keys, ("num_tokens", "num_kv_heads", "head_dim"), backend)
    num_tokens, num_kv_heads, head_dim = keys.shape
    if head_dim == 0:
        raise ShapeMismatch(f"keys: expected a head_dim of at least 1, got shape {list(keys.shape)}")
    values = accept("values", values, (num_tokens, num_kv_heads, "value_dim"), backend)
    if values.shape[2] == 0:
        raise ShapeMismatch(f"values: expected a value_dim of at least 1, got shape {list(values.shape)}")
    query = accept_query(query, "num_queries", num_kv_heads, head_dim, backend)
    if logit_sink is not None:
        logit_sink = accept("logit_sink", logit_sink, (query.shape[1],), backend)
    length = num_tokens if length is None else length
    length = in_range(length, num_tokens + 1, PositionOutOfRange, "length")

    def read(start: int, stop: int) -> tuple[Array, Array]:
        return keys[start:stop, ...], values[start:stop, ...]

    at = _standing(query.shape[0], length, causal)
    return attended(query, at, read, np.arange(length), _scale(scale, head_dim), sight, backend, logit_sink, max(1, length))


def attention_as_read(
    query: Array,
    read: Read,
    num_tokens: int,
    row: tuple[int, int],
    *,
    scale: float | None = None,
    causal: bool = False,
    sight: Sight = Sight(),
    backend: Backend = reference,
) -> Array:
    """`attention` over the `num_tokens` tokens that `read(start, stop)` returns, some at a time.

    row: (num_kv_heads, head_dim) of the keys. Raises ShapeMismatch or DtypeMismatch for the query.
    """
    query = accept_query(query, "num_queries", *row, backend)
    at = _standing(query.shape[0], num_tokens, causal)
    return attended(query, at, read, np.arange(num_tokens), _scale(scale, row[1]), sight, backend)


def _standing(num_queries: int, num_tokens: int, causal: bool) -> NDArray[np.int64]:
    """The positions of queries, int64 [num_queries]: if causal those of the last tokens, otherwise all the last position."""
    return np.arange(num_tokens - num_queries, num_tokens) if causal else np.full(num_queries, num_tokens - 1)


def _scale(scale: float | None, head_dim: int) -> float:
    """The scale, by default 1 / sqrt(head_dim)."""
    return 1 / math.sqrt(head_dim) if scale is None else scale


def accept_query(query: Array, num_queries: int | str, num_kv_heads: int, head_dim: int, backend: Backend) -> Array:
    """Return `query` as float32 [num_queries, num_query_heads, head_dim].

    Raises DtypeMismatch, or ShapeMismatch, also if num_query_heads is not a multiple of num_kv_heads.
    """
    query = accept("query", query, (num_queries, "num_query_heads", head_dim), backend)
    if num_kv_heads == 0 or query.shape[1] % num_kv_heads:
        raise ShapeMismatch(f"query: expected a multiple of {num_kv_heads} query heads, got {query.shape[1]}")
    return query


def attended(
    query: Array,
    at: NDArray[np.int64],
    read: Read,
    positions: NDArray[np.int64],
    scale: float,
    sight: Sight,
    backend: Backend,
    logit_sink: Array | None = None,
    at_once: int | None = None,
) -> Array:
    """`attention` of queries at the positions `at` [num_queries] over tokens at `positions` [n], both ascending.

    read(start, stop) returns keys and values of the tokens with the indices `[start, stop)` in `positions`. query: as
    `accept_query` returned it. at_once: the largest number of tokens to read at a time, TOKENS by default.

    The queries are divided into chunks of PIECE. For each chunk, only the tokens that one of its queries sees are read. If they
    are more than `at_once`, they are read in tiles of equal size, and the partial results are merged (`kvref.online_softmax`).
    """
    out, xp, at_once = [], backend.xp, TOKENS if at_once is None else at_once
    for start in range(0, max(1, len(at)), PIECE):
        piece = at[start : start + PIECE]
        some = query[start : start + len(piece), ...]
        seen = _seen_by_any(piece, positions, sight)

        def mask(*each: slice, piece: NDArray[np.int64] = piece) -> Array:
            return backend.asarray(sight.sees(piece[:, None], np.concatenate([positions[one] for one in each])))

        if sum(each.stop - each.start for each in seen) <= at_once:
            parts = [read(each.start, each.stop) for each in seen]
            keys, values = parts[0] if len(parts) == 1 else (xp.concat(both, axis=0) for both in zip(*parts, strict=True))
            out.append(backend.attend(some, keys, values, scale, mask(*seen), logit_sink))
        else:
            cut = (each for stretch in seen for each in _split_evenly(stretch, at_once))
            pieces = (partial(some, *read(each.start, each.stop), scale, mask(each), xp) for each in cut)
            out.append(merged(pieces, logit_sink, xp))
    return out[0] if len(out) == 1 else xp.concat(out, axis=0)


def _split_evenly(stretch: slice, at_once: int) -> Iterator[slice]:
    """Divide a slice into tiles of (almost) equal length, at most `at_once`."""
    count = -(-(stretch.stop - stretch.start) // at_once)
    ends = np.linspace(stretch.start, stretch.stop, count + 1).astype(np.int64).tolist()
    yield from (slice(start, stop) for start, stop in pairwise(ends))


def _seen_by_any(at: NDArray[np.int64], positions: NDArray[np.int64], sight: Sight) -> list[slice]:
    """Slices of `positions` with all tokens that any query at `at` sees: the sink tokens, and those in windows and chunks."""
    if not len(at):
        return [slice(0, 0)]
    begin, end = np.searchsorted(positions, [sight.first(at[0]), at[-1] + 1])
    sinks = min(np.searchsorted(positions, sight.sinks), begin)
    return [slice(0, end)] if sinks == begin else [slice(begin, end)] if not sinks else [slice(0, sinks), slice(begin, end)]


def attention_bound(query: Array, keys: Array, values: Array, scale: float) -> Array:
    """Return the largest possible error of float32 attention, for one kv head and without a mask: float64 [nq, Dv] (ATTN-04).

    query: [nq, D], keys: [n, D], values: [n, Dv], all float64. A hat (s^) marks what float32 computes, u = 2^-24 is the unit
    roundoff and g(k) = k u / (1 - k u) bounds k roundings. For any order of summation:

    - A score has D + 1 roundings: |s^ - s| <= g(D + 1) |scale| sum|q k|.
    - Subtracting the largest score rounds once more, by at most u R, where R = 2 (max|s| + the score error). The relative error
      of exp is at most EXP_ERROR.
    - Each weight is therefore correct up to a factor e^(+-l), with l = score error + 2 u R + EXP_ERROR / (1 - EXP_ERROR), and the
      normalized weight up to e^(+-2l). The sum of the weights, the division, the products and the sum of the values add 2n + 3
      roundings.
    - The second u R is for attention in tiles (`kvref.online_softmax`): the differences by which the largest score rises from
      tile to tile are rounded too, and add up to at most R. Merging a tile multiplies by an exp, and rounds a product and a sum,
      in the numerator and in the denominator: 20 (P - 1) roundings for P tiles, which is at most n if tiles have 20 tokens or
      more.

    Hence |out^ - out| <= (e^(2l) (1 + g(3n + 3)) - 1) sum p|v|, plus 2^-126 per weight whose exp underflows, in a tile or when
    tiles are merged. A logit sink counts as one more token with an exact score and the value 0: the bound for n + 1 tokens
    applies.
    """
    xp = array_namespace(query)
    n, head_dim = keys.shape
    scores = query @ keys.mT * scale
    score_error = _gamma(head_dim + 1) * abs(scale) * (xp.abs(query) @ xp.abs(keys).mT)
    reach = xp.max(xp.abs(scores) + score_error, axis=-1, keepdims=True)
    log_error = xp.max(score_error, axis=-1, keepdims=True) + 4 * U * reach + EXP_ERROR / (1 - EXP_ERROR)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    relative = xp.exp(2 * log_error) * (1 + _gamma(3 * n + 3)) - 1
    underflow = 4 * n * 2.0**-126 * xp.max(xp.abs(values), axis=0, keepdims=True) + n * 2.0**-126
    return relative * (weights @ xp.abs(values)) + underflow


def _gamma(roundings: int) -> float:
    """g(k) = k u / (1 - k u), the relative error of k roundings."""
    return roundings * U / (1 - roundings * U)
