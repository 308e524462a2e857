"""Heads with up-projection matrices, and the expected output of attention with them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import output_rounding
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.oracle.formats.mla import attention
from kvref_conformance.testlib.assertions import assert_within, normal_rows
from kvref_conformance.testlib.fixtures import round_to_input_dtype

SPREAD = 2.5  # of the scores, so small that no token outweighs all others


def sizes_of(format: str) -> dict[str, Any]:
    """Returns sizes that are multiples of the format's group. If it has no groups, the family's small sizes apply."""
    group = group_of(format)
    return {"dtype": format} | ({"rank": 2 * group, "rope_dim": group} if group > 1 else {})


@dataclass(frozen=True)
class Projections:
    """up_keys: float32 [heads, nope, rank]. up_values: float32 [heads, value_dim, rank]."""

    up_keys: NDArray
    up_values: NDArray
    rope_dim: int

    @property
    def width(self) -> int:
        """The width of a query: nope + rope."""
        return int(self.up_keys.shape[1]) + self.rope_dim

    @property
    def scale(self) -> float:
        return SPREAD / self.width

    def query(self, subject: Subject, count: int) -> NDArray:
        """Returns random queries, float32 [count, heads, nope + rope]."""
        return normal_rows(subject, count, len(self.up_keys), self.width)


def random_projections(subject: Subject, rank: int, rope_dim: int, count: int = 3, nope: int = 5, value: int = 7) -> Projections:
    """Returns heads of these sizes, or of the nearest sizes within the limits.

    Each number of a key or value is a sum over a few numbers of the latent, and each number of the latent is in some sum.
    The error bound is narrow because the sums have few products.
    """
    count = subject.size("group_size", count)
    nope, value = subject.size("nope_dim", nope), subject.size("value_dim", value)
    return Projections(_mixing_matrices(subject, count, nope, rank), _mixing_matrices(subject, count, value, rank), rope_dim)


def projections_of_cache(subject: Subject, cache: ObjectProxy, **wanted: int) -> Projections:
    """Returns heads for the rows of a cache."""
    return random_projections(subject, cache.config["rank"], cache.config["rope_dim"], **wanted)


def _mixing_matrices(subject: Subject, heads: int, numbers: int, rank: int) -> NDArray:
    """Returns float32 [heads, numbers, rank] with at most max(numbers, rank) nonzero numbers per head."""
    mixed, at = np.zeros((heads, numbers, rank), np.float32), np.arange(max(numbers, rank))
    for head in range(heads):
        numbers_of_both_signs = subject.rng.uniform(0.5, 1.5, len(at)) * subject.rng.choice((-1, 1), len(at))
        mixed[head, at % numbers, subject.rng.permutation(rank)[at % rank]] = numbers_of_both_signs
    return round_to_input_dtype(subject, mixed)


def expected_output(subject: Subject, query: NDArray, rows: Any, heads: Projections, **options: Any) -> tuple[NDArray, NDArray]:
    """Returns the output and its bound, with one more rounding if the output has a narrower dtype than float32."""
    want, bound = attention(query, np.asarray(rows), heads.up_keys, heads.up_values, **options)
    return want, bound + output_rounding(want, bound, subject.dtype)


def attend_and_compare(
    subject: Subject,
    cache: ObjectProxy,
    query: NDArray,
    heads: Projections,
    what: str,
    scale: float | None = None,
    causal: bool = False,
) -> NDArray:
    """Returns the output of the cache's attention.

    Raises ClauseViolation unless it is correct for the rows that `read` returns.
    """
    scale = heads.scale if scale is None else scale
    want, bound = expected_output(subject, query, cache.read(), heads, scale=scale, causal=causal)
    got: NDArray = cache.attend(query, heads.up_keys, heads.up_values, scale, causal)
    assert_within(got, want, bound, what)
    return got
