"""Queries for checks of attention, and the expected outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import attention as of_float32
from kvref_conformance.oracle.attention import rounding
from kvref_conformance.oracle.elements import round_to

LOUD, LOUDER = 2.0, 4.0  # key values: for the visible tokens at the ends of a range, and for the hidden tokens just past them
LOUD_SCALE = 40.0  # the softmax scale at which a LOUD token dominates all others, and a LOUDER one dominates LOUD ones


def normal(subject: Subject, *shape: int) -> NDArray:
    """Normally distributed float32 values that are exact in the subject's dtype."""
    return round_to(subject.rng.normal(size=shape).astype(np.float32), subject.dtype)


def exact(subject: Subject, query: NDArray, keys: NDArray, values: NDArray, **options: Any) -> tuple[NDArray, NDArray]:
    """The expected output and its error bound, which includes the rounding of the result to the subject's dtype."""
    want, bound = of_float32(query, keys, values, **options)
    return want, bound + rounding(want, bound, subject.dtype)


def queries(subject: Subject, count: int) -> NDArray:
    """Queries float32 [count, query heads, dim], with two query heads per kv head if the limits allow it."""
    return normal(subject, count, subject.heads * subject.size("group_size", 2), subject.dim)


def even(subject: Subject) -> float:
    """A softmax scale at which no token dominates all others, whatever the head_dim."""
    return 2.5 / subject.dim


def loud_at_ends(count: int, heads: int, dim: int, views: Sequence[NDArray]) -> NDArray:
    """Keys float32 [count, heads, dim] for which attention changes clearly if a view has one token too many or too few.

    views: arrays of the positions that a query must see. Element i of the keys is for view i: the query for it is 1 at element i
    and 0 elsewhere (`looking_at`), at LOUD_SCALE. Visible tokens next to a hidden one have LOUD there, and the hidden neighbors
    LOUDER. If a hidden neighbor is visible by mistake, it dominates the output.
    """
    keys = np.zeros((count, heads, dim), np.float32)
    for element, view in enumerate(views):
        near = {*view.tolist()}
        past = {at + side for at in near for side in (-1, 1) if 0 <= at + side < count} - near
        keys[[at for at in near if {at - 1, at + 1} - near], :, element] = LOUD
        keys[list(past), :, element] = LOUDER
    return keys


def looking_at(elements: Sequence[int | None], heads: int, dim: int) -> NDArray:
    """Queries float32 [n, heads, dim]: row n is 1 at element elements[n] and 0 elsewhere; for None it is 0 everywhere."""
    query = np.zeros((len(elements), heads, dim), np.float32)
    for row, element in enumerate(elements):
        if element is not None:
            query[row, :, element] = 1.0
    return query
