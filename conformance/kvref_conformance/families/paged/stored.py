"""The values that tokens read back as, in the format of a paged cache."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.oracle.expected import exactly, finite, float32
from kvref_conformance.oracle.formats import PLAIN
from kvref_conformance.oracle.rows import Reads
from kvref_conformance.oracle.tokens import tokens_as

Token = tuple[Reads, Reads]  # key and value, [heads, dim] each; infinite slack: unknown values


Scales = tuple[float | None, float | None]  # of keys and values, None if not given (FMT-STATIC)


def stored(keys: NDArray, values: NDArray, format: str, scales: Scales = (None, None)) -> tuple[list[Token], bool]:
    """Returns what tokens [n, heads, dim] read back as, and whether they can be rejected.

    They can if they are not finite, or would not read back finite (FMT-LEVEL-05). If such a token is accepted in a format with
    scales, the values that it reads back as are unknown.
    """
    rows = [float32(part) for part in (keys, values)]
    if format in PLAIN:
        both = [round_to(part, format) for part in rows]
        return [(exactly(key), exactly(value)) for key, value in zip(*both, strict=True)], not finite(*rows)
    read = [tokens_as(np.where(np.isfinite(part), part, 0), format, scale) for part, scale in zip(rows, scales, strict=True)]
    finite_in = [np.isfinite(part).all(axis=(1, 2)) for part in (*rows, *(each.values for each in read))]
    known: NDArray = np.logical_and.reduce(finite_in)
    for part in read:
        part.slack[~known] = np.inf
    keys_of, values_of = ([Reads(*token) for token in zip(*part, strict=True)] for part in read)
    return list(zip(keys_of, values_of, strict=True)), not known.all()


def stacked(tokens: Sequence[Token], row: tuple[int, int], format: str) -> tuple[tuple[Reads, Reads], NDArray | None]:
    """Returns keys and values [n, heads, dim] of tokens, and a mask of unknown values, or None if all are known."""
    parts = [[token[which] for token in tokens] for which in (0, 1)]
    values = [np.array([part.values for part in each], np.float32).reshape(-1, *row) for each in parts]
    if format in PLAIN:
        return (exactly(values[0]), exactly(values[1])), None
    slack = [np.array([part.slack for part in each], np.float64).reshape(-1, *row) for each in parts]
    unsure = np.isinf(slack[0])
    both = [Reads(value, np.where(unsure, 0, each)) for value, each in zip(values, slack, strict=True)]
    return (both[0], both[1]), unsure if unsure.any() else None
