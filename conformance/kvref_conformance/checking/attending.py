"""Queries to attend with, and what must come of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import attention as of_float32
from kvref_conformance.oracle.attention import rounding
from kvref_conformance.oracle.elements import round_to

LOUD, LOUDER = 2.0, 4.0  # in a key: what a query sees at its ends, and what lies just past them
LOUD_SCALE = 40.0  # so that a loud token outweighs all that are not, and a louder one those


def normal(subject: Subject, *shape: int) -> NDArray:
    """float32, in numbers that the dtype holds."""
    return round_to(subject.rng.normal(size=shape).astype(np.float32), subject.dtype)


def exact(subject: Subject, query: NDArray, keys: NDArray, values: NDArray, **options: Any) -> tuple[NDArray, NDArray]:
    """The output and its bound, with one rounding more where it is answered in a narrower dtype."""
    want, bound = of_float32(query, keys, values, **options)
    return want, bound + rounding(want, bound, subject.dtype)


def queries(subject: Subject, count: int) -> NDArray:
    """float32 [count, query heads, dim], to a cache: two query heads a kv head, where that may be."""
    return normal(subject, count, subject.heads * subject.size("group_size", 2), subject.dim)


def even(subject: Subject) -> float:
    """A scale by which no token of a cache outweighs all others, however wide they are."""
    return 2.5 / subject.dim


def loud_at_ends(count: int, heads: int, dim: int, views: Sequence[NDArray]) -> NDArray:
    """Keys float32 [count, heads, dim] that tell views apart by a token more or less at any of their ends.

    Element i is for a query that looks at it alone, by LOUD_SCALE. Of what that has to see the tokens are loud that have a
    neighbour which it must not see, and those neighbours are louder: one of them seen is all that is seen.
    """
    keys = np.zeros((count, heads, dim), np.float32)
    for element, view in enumerate(views):
        near = {*view.tolist()}
        past = {at + side for at in near for side in (-1, 1) if 0 <= at + side < count} - near
        keys[[at for at in near if {at - 1, at + 1} - near], :, element] = LOUD
        keys[list(past), :, element] = LOUDER
    return keys


def looking_at(elements: Sequence[int | None], heads: int, dim: int) -> NDArray:
    """Queries float32 [n, heads, dim], each of which looks at one element; None at nothing."""
    query = np.zeros((len(elements), heads, dim), np.float32)
    for row, element in enumerate(elements):
        if element is not None:
            query[row, :, element] = 1.0
    return query
