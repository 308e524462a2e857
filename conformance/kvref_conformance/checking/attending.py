"""Queries to attend with, and what must come of them."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import attention as of_float32
from kvref_conformance.oracle.attention import rounding
from kvref_conformance.oracle.elements import round_to


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
