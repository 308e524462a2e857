"""Keys quantized by channel, values by token: what tokens read back as, from how many there are (KIVI-01, KIVI-02)."""

from typing import NamedTuple

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.oracle.formats import GROUPS, group_of
from kvref_conformance.oracle.rows import Reads, read_as
from kvref_conformance.oracle.tokens import row_bytes

FORMATS = tuple(name for name in GROUPS if name.startswith("u"))  # affine ones
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


class Counts(NamedTuple):
    """Of so many tokens, those whose keys, and whose values, are quantized."""

    keys: int
    values: int


def counts(tokens: int, residual: int) -> Counts:
    return Counts(tokens - tokens % residual, max(0, tokens - residual))


def key_groups(keys: NDArray, format: str) -> Reads:
    """What keys [n, heads, dim] read as that fill whole groups: a row of the format for each channel of each group."""
    count, heads, dim = keys.shape
    cut = keys.reshape(count // group_of(format), group_of(format), heads, dim)
    rows = np.moveaxis(cut, 1, 3)  # [groups, heads, dim, group]
    values, slack = (np.moveaxis(part, 3, 1).reshape(count, heads, dim) for part in read_as(rows, format))
    return Reads(values, slack)


def in_full(tokens: NDArray, dtype: str) -> Reads:
    return read_as(tokens, dtype)


def reads(keys: NDArray, values: NDArray, residual: int, format: str, dtype: str) -> tuple[Reads, Reads]:
    """What tokens [n, heads, dim] read back as."""
    keys, values = round_to(keys, dtype), round_to(values, dtype)
    quantized = counts(len(keys), residual)
    return (
        joined(key_groups(keys[: quantized.keys], format), in_full(keys[quantized.keys :], dtype)),
        joined(read_as(values[: quantized.values], format), in_full(values[quantized.values :], dtype)),
    )


def joined(*parts: Reads) -> Reads:
    return Reads(np.concatenate([part.values for part in parts]), np.concatenate([part.slack for part in parts]))


def cache_bytes(tokens: int, heads: int, dim: int, residual: int, format: str, dtype: str) -> int:
    """Of codes, scales and zeros, and of numbers in full (KIVI-05)."""
    group = group_of(format)
    keys, values = counts(tokens, residual)
    groups = (keys // group * heads * dim + values * heads * (dim // group)) * row_bytes(group, format)
    return groups + (2 * tokens - keys - values) * heads * dim * ITEM[dtype]
