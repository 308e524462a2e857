"""Tokens [n, num_kv_heads, head_dim] as caches store them, by the definition of their rows.

Affine formats share a scale over all heads of a token, the others over a head's row or less.
"""

from math import prod
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle import ggml, groups
from kvref_conformance.oracle.expected import Wrong, finite, float32, not_finite
from kvref_conformance.oracle.formats import AFFINE, GGML, GROUPS, IN_GROUPS, PLAIN, ROTATED, STATIC, bits_of, group_of, inner_of
from kvref_conformance.oracle.rotated import block_of
from kvref_conformance.oracle.rows import Reads, bounds, read_as, store

ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


def tokens_as(tokens: NDArray, format: str, scale: float | None = None) -> Reads:
    """What tokens read as once they are stored, and how far from it an implementation of level tolerant may be.

    scale: where it is given (FMT-STATIC), 1.0 otherwise.
    """
    rows = np.asarray(tokens, np.float32)
    if not rows.size:
        return Reads(rows, np.zeros(rows.shape))
    if format in AFFINE:
        stored = read_as(rows.reshape(len(rows), prod(rows.shape[1:])), format)
        return Reads(*(part.reshape(rows.shape) for part in stored))
    return read_as(rows, format, scale)


def stored_again(values: NDArray, slack: NDArray, format: str) -> Reads:
    """What tokens [n, num_kv_heads, head_dim] read as once stored, of which what went before leaves a slack."""
    stored = tokens_as(values, format)
    return Reads(stored.values, _moved(stored.slack, slack, format))


def stored_from(near: NDArray, slack: NDArray, format: str, scale: float | None, level: str) -> NDArray:
    """How far from tokens `near` may be what others, no further from them than the slack, are stored as: float64."""
    rows = np.asarray(near, np.float32)
    if level != "exact":
        return _moved(tokens_as(rows, format, scale).slack, slack, format)
    flat = rows.reshape(len(rows) if format in AFFINE else -1, prod(rows.shape[1 if format in AFFINE else 2 :]))
    return _moved(bounds(flat, store(flat, format, scale=scale), format)[0].reshape(rows.shape), slack, format)


def _moved(own: NDArray, slack: NDArray, format: str) -> NDArray:
    """A format's own bound for tokens, and what it is for those that lie no further from them than a slack.

    Slack d moves a row by d and its scale by no more, which three times d covers. A scale of few digits may go on to the next,
    twice as large, by any d at all: then the format's own bound is as much larger. Rotated, a number may move by all that n
    numbers do over the square root of n, and once more when it is rotated back: by n d.
    """
    before = slack.max(axis=(1, 2), keepdims=True, initial=0)
    spread = block_of(own.shape[-1]) if format in ROTATED else 1
    return np.asarray(np.where((before > 0) & (group_of(format) > 1), 2 * own, own) + 3 * spread * before)


def token_bytes(heads: int, dim: int, format: str) -> int:
    """What a token's keys, or its values, take: codes, scales and zeros."""
    if format in PLAIN:
        return ITEM[format] * heads * dim
    if format in AFFINE:
        return (heads * dim if format == "q8" else -(-heads * dim // 2)) + 8
    return heads * row_bytes(dim, format)


def row_bytes(width: int, format: str) -> int:
    """What a row takes, scales and zeros included, where it has scales of its own."""
    if format in STATIC:
        return width
    format = inner_of(format)
    if format in GGML:
        return width // 32 * ggml.LAYOUT[format].itemsize
    if format not in IN_GROUPS:
        return width + 4
    scales = width // group_of(format)
    if format in GROUPS:
        scales *= (4 if groups.scale_dtype(format) == "float32" else 2) * (2 if groups.is_affine(format) else 1)
    return width * bits_of(format) // 8 + scales


def storable(tokens: NDArray, format: str) -> bool:
    """Whether tokens would be finite once read back (FMT-LEVEL-05); plain dtypes take what there is."""
    if format in PLAIN or tokens.shape[-1] % group_of(format):  # what no group goes into is wrong in its shape, and is never read
        return True
    return bool(np.isfinite(tokens_as(tokens, format).values).all())


def unstorable(keys: Any, values: Any, format: str) -> Wrong:
    """What may be said besides of a call that is wrong: whether tokens [..., heads, dim], of any shape, may be refused."""
    given = [np.asarray(part) for part in (keys, values)]
    if format in PLAIN or not finite(*given):
        return not_finite(*given)
    group = group_of(format)  # what no group goes into is wrong in its shape, and is never read
    whole = [float32(part) for part in given if part.size and part.ndim > 1 and part.shape[-1] % group == 0]
    return not_finite(*(tokens_as(part.reshape(-1, *part.shape[-2:]), format).values for part in whole))
