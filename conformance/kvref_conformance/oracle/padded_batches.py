"""What the models of caches with a batch of rows share: errors of counts, and attention row by row (RAGGED, CROSS)."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend
from kvref_conformance.oracle.expectations import (
    Errors,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    dtype_errors,
    exact_reads,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats.per_row import ExpectedReads


def count_errors(clause: str, counts: Sequence[Any], limits: Sequence[int | None]) -> Errors:
    """Returns the errors of counts, of which there must be one per limit, and at most the limit."""
    if len(counts) != len(limits):
        return [("ShapeMismatch", clause)]
    wrong = [
        range_errors(count, limit if limit is None else limit + 1, "PositionOutOfRange", clause)
        for count, limit in zip(counts, limits, strict=True)
    ]
    return [each for found in wrong for each in found][:1]


def query_errors(query: Any, rows: int, heads: int, dim: int) -> Errors:
    """Returns the errors of queries [rows, num_query_heads, num_queries, dim] for `heads` heads of keys and values."""
    shape = np.shape(query)
    fits = len(shape) == 4 and (shape[0], shape[3]) == (rows, dim) and shape[1] % heads == 0
    return ([] if fits else [("ShapeMismatch", "LAW-10")]) + dtype_errors(query)


def expect_attend_by_row(
    clause: str, query: Any, scale: float | None, rows: Iterable[tuple[Sequence[NDArray], Sequence[NDArray]]]
) -> Expectation:
    """The expected attention of queries [rows, num_query_heads, num_queries, head_dim].

    rows: for each row its keys and values, [n, num_kv_heads, head_dim] each, and for each query the indices that it sees.
    scale: None means 1 / sqrt(head_dim).
    """
    shape, parts = np.shape(query), list[ExpectedArrays]()
    scale = shape[3] ** -0.5 if scale is None else scale
    for of_row, (pair, views) in zip(to_float32(query), rows, strict=True):
        keys, values = map(exact_reads, pair)
        one = expect_attend(clause, of_row.swapaxes(0, 1), keys, values, scale, views)
        if not isinstance(one, ExpectedArrays):
            return UnjudgedReply(clause)
        parts.append(one)
    out, slack = (_by_row([getattr(part.parts[0], name) for part in parts], shape) for name in ("values", "slack"))

    def weight_slack(dtype: str) -> NDArray:
        return _by_row([part.weight_slack(dtype) for part in parts if part.weight_slack], shape)

    return ExpectedArrays(clause, parts=(ExpectedReads(out, slack),), always_slack=True, weight_slack=weight_slack)


def _by_row(parts: list[NDArray], shape: Sequence[int]) -> NDArray:
    """Returns arrays of one row each, [num_queries, num_query_heads, head_dim] or a number, as one array of this shape."""
    _, heads, count, dim = shape
    return np.stack([np.broadcast_to(part, (count, heads, dim)).swapaxes(0, 1) for part in parts])
