"""Attention over what a cache reads as: softmax(scale q k') v, per query head, with grouped key-value heads (GQA)."""

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
from kvref.inputs import accept
from kvref.pieces import merged, partial

EXP_ERROR = 8 * U  # the premise about a library's float32 exp: within 4 units in the last place
LONGEST = 2**62  # tokens that any sequence may have: sums of two such numbers are int64
TOKENS = 512  # that are read at once: as float32 they take some megabytes, and what they are made of stays as it is
PIECE = 256  # queries whose mask is there at once, [PIECE, tokens that any of them sees]: however long a prompt is, a small one

# Keys and values of the tokens [start, stop): float32 [stop - start, num_kv_heads, head_dim], and as wide as values are.
Read: TypeAlias = Callable[[int, int], tuple[Array, Array]]


@dataclass(frozen=True)
class Sight:
    """What a query sees: no token that is later than its own, and of the others

    - the last `window`, its own among them (WIN-01), all of them where it is None;
    - of these, where `chunk` is not 0, those in its own chunk of so many positions (WIN-07);
    - and the first `sinks` of all, whatever else is said.

    Raises ConfigError for numbers that are none.
    """

    window: int | None = None
    sinks: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.window is not None:
            whole_fields(self, "window")
        whole_fields(self, "sinks", "chunk", minimum=0)

    def sees(self, query: Any, token: Any) -> Any:
        """Whether a query at one position sees the token at another: integers, or NumPy's arrays of them, which broadcast."""
        return (token <= query) & ((token >= self.first(query)) | (token < self.sinks))

    def first(self, query: Any) -> Any:
        """The first position behind the sinks that a query at one sees. May be negative."""
        query = np.int64(query)  # of an unsigned one nothing could be taken away
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
    """float32 [num_queries, num_query_heads, value_dim].

    query [num_queries, num_query_heads, head_dim]; keys [num_tokens, num_kv_heads, head_dim]; values [num_tokens, num_kv_heads,
    value_dim]. Query head h reads kv head h // (num_query_heads / num_kv_heads). scale: 1 / sqrt(head_dim) unless given. length:
    only the first `length` tokens count; what lies past them has no effect, NaN included (ATTN-07). causal: the queries are the
    last tokens of those, and each sees the tokens up to its own (ATTN-09); else each stands where the last token does. sight:
    what it sees of those. logit_sink: float32 [num_query_heads], by head the score of a token without a value (WIN-08). A query
    that sees no tokens gets zeros (ATTN-08).

    Raises ShapeMismatch, keys or values of no elements included, DtypeMismatch, or PositionOutOfRange for the length.
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
    """`attention` over tokens whose keys are row = [num_kv_heads, head_dim], read some at a time.

    Raises ShapeMismatch or DtypeMismatch for the query.
    """
    query = accept_query(query, "num_queries", *row, backend)
    at = _standing(query.shape[0], num_tokens, causal)
    return attended(query, at, read, np.arange(num_tokens), _scale(scale, row[1]), sight, backend)


def _standing(num_queries: int, num_tokens: int, causal: bool) -> NDArray[np.int64]:
    """Where queries stand: at the last tokens, or all where the last one does."""
    return np.arange(num_tokens - num_queries, num_tokens) if causal else np.full(num_queries, num_tokens - 1)


def _scale(scale: float | None, head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if scale is None else scale


def accept_query(query: Array, num_queries: int | str, num_kv_heads: int, head_dim: int, backend: Backend) -> Array:
    """`query` as float32 [num_queries, num_query_heads, head_dim]. Raises ShapeMismatch or DtypeMismatch."""
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
    """`attention` of queries that stand at positions `at` [num_queries] over tokens that lie at `positions` [n].

    Both ascend, and the query was accepted. No more than `at_once` tokens are read at a time, TOKENS unless given, and none but
    those that some query of a piece sees: what a cache holds is never there as float32 as a whole.
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
            cut = (each for stretch in seen for each in _cut(stretch, at_once))
            pieces = (partial(some, *read(each.start, each.stop), scale, mask(each), xp) for each in cut)
            out.append(merged(pieces, logit_sink, xp))
    return out[0] if len(out) == 1 else xp.concat(out, axis=0)


def _cut(stretch: slice, at_once: int) -> Iterator[slice]:
    """Pieces of a stretch, as long as each other and no longer than `at_once`."""
    count = -(-(stretch.stop - stretch.start) // at_once)
    ends = np.linspace(stretch.start, stretch.stop, count + 1).astype(np.int64).tolist()
    yield from (slice(start, stop) for start, stop in pairwise(ends))


def _seen_by_any(at: NDArray[np.int64], positions: NDArray[np.int64], sight: Sight) -> list[slice]:
    """Where in `positions` all lie that any query of these sees: at the front the sinks, and at the end what is recent."""
    if not len(at):
        return [slice(0, 0)]
    begin, end = np.searchsorted(positions, [sight.first(at[0]), at[-1] + 1])
    sinks = min(np.searchsorted(positions, sight.sinks), begin)
    return [slice(0, end)] if sinks == begin else [slice(begin, end)] if not sinks else [slice(0, sinks), slice(begin, end)]


def attention_bound(query: Array, keys: Array, values: Array, scale: float) -> Array:
    """How far float32 attention may lie from exact, at worst: float64, the output's shape, for one kv head and no mask.

    A logit sink is one token more, whose score has no error and whose value is 0: what holds for n + 1 holds with it.

    query [nq, D], keys [n, D], values [n, Dv], in float64. Whatever the order of summation:

    - a score carries D + 1 roundings: |s^ - s| <= g(D + 1) |scale| sum|q k|, g(k) = k u / (1 - k u);
    - subtracting the largest rounds once more, by at most u R, R = 2 (max|s| + that error); exp errs by EXP_ERROR;
    - so each weight is right to a factor e^(+-l), l = score error + 2 u R + EXP_ERROR / (1 - EXP_ERROR), and the normalised
      weight to e^(+-2l); the sum of weights, the division, the products and the sum of values add 2n + 3 roundings;
    - the second u R is for pieces (kvref.pieces): what the largest so far rises by is rounded too, R in all. With each of P
      pieces one of two factors is an exp, and a product and a sum are rounded, above and below the line: 20 (P - 1) roundings,
      which are at most n for pieces of 20 tokens or more.

    Hence |out^ - out| <= (e^(2l) (1 + g(3n + 3)) - 1) sum p|v|, and 2^-126 a weight where exp underflows, in a piece or of one.
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
    return roundings * U / (1 - roundings * U)
