"""Tokens [n, num_kv_heads, head_dim] in the formats of caches, computed with the definitions of rows (oracle/formats/per_row.py).

In affine formats (q8, q4), all heads of a token share a scale. In all other formats each head has a scale of its own, or several.
"""

from math import prod
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import Errors, all_finite, finite_errors, to_float32
from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    PLAIN_FORMATS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
    bits_of,
    ggml,
    group_of,
    inner_of,
    per_group,
)
from kvref_conformance.oracle.formats.hadamard_rotation import block_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads, bounds, read_as, store

ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


def expected_tokens(tokens: NDArray, format: str, scale: float | None = None) -> ExpectedReads:
    """The values of tokens after storing and reading, with the slack of level tolerant.

    scale: the scale of a static format (FMT-STATIC), default 1.0.
    """
    rows = np.asarray(tokens, np.float32)
    if not rows.size:
        return ExpectedReads(rows, np.zeros(rows.shape))
    if format in AFFINE_FORMATS:
        stored = read_as(rows.reshape(len(rows), prod(rows.shape[1:])), format)
        return ExpectedReads(*(part.reshape(rows.shape) for part in stored))
    return read_as(rows, format, scale)


def restored_values(values: NDArray, slack: NDArray, format: str) -> ExpectedReads:
    """The values of tokens [n, num_kv_heads, head_dim] after storing, if the tokens themselves are only known within `slack`."""
    stored = expected_tokens(values, format)
    return ExpectedReads(stored.values, _enlarged_bound(stored.slack, slack, format))


def restored_slack(near: NDArray, slack: NDArray, format: str, scale: float | None, level: str) -> NDArray:
    """How far from tokens `near` the stored values of other tokens may be, if these are within `slack` of `near`: float64."""
    rows = np.asarray(near, np.float32)
    if level != "exact":
        return _enlarged_bound(expected_tokens(rows, format, scale).slack, slack, format)
    flat = rows.reshape(len(rows) if format in AFFINE_FORMATS else -1, prod(rows.shape[1 if format in AFFINE_FORMATS else 2 :]))
    return _enlarged_bound(bounds(flat, store(flat, format, scale=scale), format)[0].reshape(rows.shape), slack, format)


def _enlarged_bound(own: NDArray, slack: NDArray, format: str) -> NDArray:
    """The bound of a format, enlarged for tokens that are only known within a slack d.

    A slack d moves a row by at most d, and its scale by at most d; 3 d covers both. A scale with few digits may be rounded to
    the next one, twice as large, for any d > 0; then the format's own bound doubles too. In a rotated block of n numbers, a
    number moves by up to sqrt(n) d, and again by sqrt(n) when it is rotated back: n d.
    """
    before = slack.max(axis=(1, 2), keepdims=True, initial=0)
    spread = block_of(own.shape[-1]) if format in ROTATED_FORMATS else 1
    return np.asarray(np.where((before > 0) & (group_of(format) > 1), 2 * own, own) + 3 * spread * before)


def token_bytes(heads: int, dim: int, format: str) -> int:
    """Bytes of a token's keys (or values): codes, scales and zeros."""
    if format in PLAIN_FORMATS:
        return ITEM[format] * heads * dim
    if format in AFFINE_FORMATS:
        return (heads * dim if format == "q8" else -(-heads * dim // 2)) + 8
    return heads * row_bytes(dim, format)


def row_bytes(width: int, format: str) -> int:
    """Bytes of a row with its scales and zeros, in a format whose rows have their own scales."""
    if format in STATIC_FORMATS:
        return width
    format = inner_of(format)
    if format in GGML_FORMATS:
        return width // 32 * ggml.LAYOUT[format].itemsize
    if format not in FORMATS_IN_GROUPS:
        return width + 4
    scales = width // group_of(format)
    if format in GROUP_FORMATS:
        scales *= (4 if per_group.scale_dtype(format) == "float32" else 2) * (2 if per_group.is_affine(format) else 1)
    return width * bits_of(format) // 8 + scales


def is_storable(tokens: NDArray, format: str) -> bool:
    """Whether stored tokens would be finite when they are read (FMT-LEVEL-05). Plain dtypes store any tokens."""
    if format in PLAIN_FORMATS or tokens.shape[-1] % group_of(
        format
    ):  # a width that is no multiple of the group: the shape is wrong
        return True
    return bool(np.isfinite(expected_tokens(tokens, format).values).all())


def storage_errors(keys: Any, values: Any, format: str) -> Errors:
    """The error NonFinite, if an invalid call with these tokens [..., heads, dim] may also raise it; otherwise empty."""
    given = [np.asarray(part) for part in (keys, values)]
    if format in PLAIN_FORMATS or not all_finite(*given):
        return finite_errors(*given)
    group = group_of(format)  # rows whose width is no multiple of it have a wrong shape, and are never stored
    whole = [to_float32(part) for part in given if part.size and part.ndim > 1 and part.shape[-1] % group == 0]
    return finite_errors(*(expected_tokens(part.reshape(-1, *part.shape[-2:]), format).values for part in whole))
