"""Tokens [n, num_kv_heads, head_dim] as caches store them, by the definition of their rows.

Affine formats share a scale over all heads of a token, the others over a head's row or less.
"""

from math import prod
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.expected import Wrong, finite, float32, not_finite
from kvref_conformance.oracle.formats import AFFINE, PLAIN, group_of
from kvref_conformance.oracle.rows import Reads, read_as, row_bytes

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


def token_bytes(heads: int, dim: int, format: str) -> int:
    """What a token's keys, or its values, take: codes, scales and zeros."""
    if format in PLAIN:
        return ITEM[format] * heads * dim
    if format in AFFINE:
        return (heads * dim if format == "q8" else -(-heads * dim // 2)) + 8
    return heads * row_bytes(dim, format)


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
