"""KIVI: keys quantized per channel, values per token. The expected values depend on the number of tokens (KIVI-01, KIVI-02)."""

from typing import NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import GROUP_FORMATS, group_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads, read_as
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.token_storage import row_bytes

KIVI_FORMATS = tuple(name for name in GROUP_FORMATS if name.startswith("u"))  # the affine formats
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


class ChannelCounts(NamedTuple):
    """The number of tokens whose keys are quantized, and of those whose values are."""

    keys: int
    values: int


def quantized_counts(tokens: int, residual: int) -> ChannelCounts:
    """How many of `tokens` tokens are quantized."""
    return ChannelCounts(tokens - tokens % residual, max(0, tokens - residual))


def expected_key_groups(keys: NDArray, format: str) -> ExpectedReads:
    """The expected values of keys [n, heads, dim] in complete groups. Each channel of each group is a row of the format."""
    count, heads, dim = keys.shape
    cut = keys.reshape(count // group_of(format), group_of(format), heads, dim)
    rows = np.moveaxis(cut, 1, 3)  # [groups, heads, dim, group]
    values, slack = (np.moveaxis(part, 3, 1).reshape(count, heads, dim) for part in read_as(rows, format))
    return ExpectedReads(values, slack)


def unquantized_reads(tokens: NDArray, dtype: str) -> ExpectedReads:
    """The expected values of tokens that are not quantized."""
    return read_as(tokens, dtype)


def expected_reads(keys: NDArray, values: NDArray, residual: int, format: str, dtype: str) -> tuple[ExpectedReads, ExpectedReads]:
    """The expected values of tokens [n, heads, dim]."""
    keys, values = round_to(keys, dtype), round_to(values, dtype)
    quantized = quantized_counts(len(keys), residual)
    return (
        concatenate_reads(expected_key_groups(keys[: quantized.keys], format), unquantized_reads(keys[quantized.keys :], dtype)),
        concatenate_reads(read_as(values[: quantized.values], format), unquantized_reads(values[quantized.values :], dtype)),
    )


def concatenate_reads(*parts: ExpectedReads) -> ExpectedReads:
    """Concatenate along the tokens."""
    return ExpectedReads(np.concatenate([part.values for part in parts]), np.concatenate([part.slack for part in parts]))


def cache_bytes(tokens: int, heads: int, dim: int, residual: int, format: str, dtype: str) -> int:
    """The bytes of codes, scales and zeros, and of tokens that are not quantized (KIVI-05)."""
    group = group_of(format)
    keys, values = quantized_counts(tokens, residual)
    groups = (keys // group * heads * dim + values * heads * (dim // group)) * row_bytes(group, format)
    return groups + (2 * tokens - keys - values) * heads * dim * ITEM[dtype]
