"""Checks of LAW-18: attention at production sizes, with inputs in which a single missing token changes the result."""

import math

from kvref_conformance.checking.attending import exact, normal
from kvref_conformance.checking.expect import within
from kvref_conformance.checking.real import DIMS, edges
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.attention.checks import attend, fitted

HEADS = ((8, 2), (12, 12), (16, 2), (7, 1))  # query heads and kv heads


def judged(subject: Subject, queries: int, heads: tuple[int, int], length: int, dim: int, padding: int = 3) -> None:
    """Checks attention over `length` tokens followed by padding, at the nearest sizes within the limits."""
    _, query_heads, kv_heads, _, dim = fitted(subject, queries, *heads, length, dim)
    query = normal(subject, queries, query_heads, dim)
    keys, values = (normal(subject, length + padding, kv_heads, dim) for _ in range(2))
    scale, causal = 1 / math.sqrt(dim), 1 < queries <= length and not padding
    got = attend(subject, query, keys, values, scale, causal=causal, length=length)
    want, bound = exact(subject, query, keys[:length], values[:length], scale=scale, causal=causal)
    within(got, want, bound, f"attention of {queries} x {query_heads} over {length} x {kv_heads} x {dim}")


@check("LAW-18", "attention")
def every_token_counts_at_any_length(subject: Subject) -> None:
    for length in edges(1025):
        judged(subject, 1, (4, 2), length, 64)
    judged(subject, 1, (2, 1), 4097, 64)


@check("LAW-18", "attention")
def every_element_counts_at_any_width(subject: Subject) -> None:
    for dim in DIMS:
        for heads in HEADS:
            judged(subject, 1, heads, 130, dim)


@check("LAW-18", "attention")
def prompts_end_anywhere_in_a_tile(subject: Subject) -> None:
    for queries in (15, 17, 63, 65, 127, 129):
        judged(subject, queries, (2, 1), queries + 40, 64, padding=0)


@check("LAW-18", "attention", real=True)
def heads_and_lengths_are_as_models_have_them(subject: Subject) -> None:
    for heads, dim in (((32, 8), 128), ((8, 4), 256), ((32, 32), 96), ((12, 12), 64), ((16, 1), 576)):
        for length in (4095, 4097):
            judged(subject, 1, heads, length, dim)
    judged(subject, 33, (32, 8), 300, 128, padding=0)
    judged(subject, 1, (8, 1), 16_385, 128)
