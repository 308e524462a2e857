"""Checks of ATTN: softmax(scale q k') v, and tokens that must have no effect on it."""

import math
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import exact, normal
from kvref_conformance.checking.expect import same, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import rounding
from kvref_conformance.oracle.elements import MAX, round_to
from kvref_conformance.outcome import NotOffered

Shape = tuple[int, int, int, int, int]  # queries, query heads, kv heads, tokens, dim
SHAPES = ((1, 1, 1, 3, 4), (5, 2, 2, 8, 16), (3, 6, 2, 11, 5), (2, 8, 1, 40, 64))


def fitted(subject: Subject, queries: int, heads: int, kv_heads: int, count: int, dim: int) -> Shape:
    """Returns the nearest shape within the limits."""
    group, kv_heads = subject.size("group_size", heads // kv_heads), subject.size("num_kv_heads", kv_heads)
    return queries, kv_heads * group, kv_heads, count, subject.size("head_dim", dim)


def shapes(subject: Subject) -> list[Shape]:
    """Returns SHAPES, each changed to the nearest shape within the limits."""
    return [fitted(subject, *shape) for shape in SHAPES]


def inputs(subject: Subject, queries: int, heads: int, kv_heads: int, count: int, dim: int) -> tuple[NDArray, NDArray, NDArray]:
    shapes = (queries, heads, dim), (count, kv_heads, dim), (count, kv_heads, dim)
    query, keys, values = (normal(subject, *shape) for shape in shapes)
    return query, keys, values


def first_elements(subject: Subject, *numbers: float) -> NDArray:
    """Returns float32 [n, num_kv_heads, dim]: tokens whose first element is given and whose others are 0."""
    tokens = np.zeros((len(numbers), subject.size("num_kv_heads", 1), subject.size("head_dim", 1)), np.float32)
    tokens[..., 0] = round_to(np.array(numbers), subject.dtype)[:, None]
    return tokens


def grouped(subject: Subject, rows: NDArray, group: int = 1) -> NDArray:
    """Returns the rows of each kv head repeated for the query heads that read it."""
    return np.repeat(rows, subject.size("group_size", group), axis=1)


def attend(subject: Subject, query: NDArray, keys: NDArray, values: NDArray, scale: float = 0.5, **options: Any) -> NDArray:
    options = {"causal": False, "length": len(keys)} | options
    output: NDArray = subject.new("attention").attention(query, keys, values, scale=scale, **options)
    return output


@check("ATTN-01a", "attention")
def each_head_reads_its_group(subject: Subject) -> None:
    for wanted_kv_heads, wanted in ((2, 2), (2, 6), (1, 4), (3, 6)):
        _, heads, kv_heads, _, dim = fitted(subject, 2, wanted, wanted_kv_heads, 1, 4)
        keys, values = np.zeros((1, kv_heads, dim), np.float32), np.zeros((1, kv_heads, dim), np.float32)
        values[0] = np.arange(kv_heads)[:, None]
        got = attend(subject, np.zeros((2, heads, dim), np.float32), keys, values)
        want = [[[head // (heads // kv_heads)] * dim for head in range(heads)]] * 2
        same(got, np.array(want, np.float32), f"output of {heads} query heads over {kv_heads} kv heads with the values 0, 1, ...")


@check("ATTN-01a", "attention")
def weights_are_the_softmax_of_scaled_scores(subject: Subject) -> None:
    tokens = first_elements(subject, 0.0, 1.0)
    for scale in (0.0, 1.0, 2.5, -1.0):
        got = attend(subject, grouped(subject, tokens[1:]), tokens, tokens, scale)
        want = grouped(subject, tokens[1:]) / (1 + math.exp(-scale))
        within(got, want, 1e-6 + rounding(want, np.zeros(1), subject.dtype), f"weight of the second token at scale {scale}")


@check("ATTN-01b", "attention")
def the_output_is_as_wide_as_the_values(subject: Subject) -> None:
    other_widths = 0
    for heads, kv_heads, wanted in ((2, 2, 3), (6, 2, 9), (4, 1, 1)):
        shape, width = fitted(subject, 3, heads, kv_heads, 7, 5), subject.size("head_dim", wanted)
        dim = shape[4] if shape[4] != width else subject.size("head_dim", 99)  # another width, as far away as the limits allow
        query, keys, _ = inputs(subject, *shape[:4], dim)
        values = normal(subject, 7, shape[2], width)
        want, bound = exact(subject, query, keys, values, scale=0.5)
        within(attend(subject, query, keys, values), want, bound, f"attention over keys of {dim} elements and values of {width}")
        other_widths += dim != width
    if not other_widths:
        raise NotOffered(f"values of another width than keys: its limits allow only {width}")


@check("ATTN-02", "attention")
def one_token_gives_its_value_back(subject: Subject) -> None:
    for shape in shapes(subject):
        query, keys, values = inputs(subject, *shape)
        group = shape[1] // shape[2]
        want = np.broadcast_to(np.repeat(values[:1], group, axis=1), (shape[0], shape[1], shape[4]))
        same(attend(subject, query, keys[:1], values[:1]), want, "attention over one token")


@check("ATTN-03a", "attention")
def large_scores_do_not_overflow(subject: Subject) -> None:
    query, keys, values = inputs(subject, *fitted(subject, 2, 2, 2, 6, 4))
    for factor in (100.0, 1e4, -1e4):
        held = np.abs(query).max() * abs(factor) <= MAX.get(subject.dtype, np.inf)  # otherwise the scale is that large
        large = round_to(query * np.float32(factor if held else 1.0), subject.dtype)
        got = attend(subject, large, keys, values, 1.0 if held else factor)
        true(np.isfinite(got).all(), f"output with queries * {factor}", "finite values", got)
    number, scale = root_and_scale(subject, 1e36)
    tokens, ones = first_elements(subject, *[number] * 4), first_elements(subject, *[1.0] * 4)
    tied = attend(subject, grouped(subject, tokens[:1]), tokens, ones, 0.5 * scale)
    within(tied, grouped(subject, ones[:1]), 1e-6, "output over four tokens with equal, large scores")


@check("ATTN-03b", "attention")
@np.errstate(over="ignore", invalid="ignore")  # the check uses scores beyond float32
def what_float32_cannot_hold_gives_nan_or_the_exact_output(subject: Subject) -> None:
    large, scale = root_and_scale(subject, 1e40)
    for query, keys, exactly in (
        (large, [-large], 7.0), (large, [large], 7.0), (large, [-large, -2 * large], 7.0), (large, [large, 2 * large], 8.0),
        (large, [0, large], 8.0), (1.0, [-np.inf], np.nan), (1.0, [-np.inf, -np.inf], np.nan), (1.0, [np.inf], np.nan),
        (1.0, [-np.inf, 1.0], 8.0),
    ):  # fmt: skip
        values = first_elements(subject, *range(7, 7 + len(keys)))
        q = grouped(subject, first_elements(subject, query))
        got = float(attend(subject, q, first_elements(subject, *keys), values, scale if query == large else 1.0)[0, 0, 0])
        true(np.isnan(got) or got == exactly, f"output of query {query} over keys {keys}", f"{exactly} or NaN", got)


def root_and_scale(subject: Subject, product: float) -> tuple[float, float]:
    """Returns x and scale with x * x * scale == product, such that the dtype can represent 2 * x."""
    number = math.sqrt(product)
    if number * 2 <= MAX.get(subject.dtype, np.inf):
        return number, 1.0
    return 2.0**14, product / 2.0**28


@check("ATTN-04", "attention")
def output_is_within_the_bound_of_exact(subject: Subject) -> None:
    for shape in shapes(subject):
        for causal in (False, True):
            query, keys, values = inputs(subject, *shape)
            for scale in (1 / math.sqrt(shape[4]), 3.0):
                want, bound = exact(subject, query, keys, values, scale=scale, causal=causal)
                within(attend(subject, query, keys, values, scale, causal=causal), want, bound, f"output for the shape {shape}")


@check("ATTN-05", "attention")
def output_lies_among_the_values(subject: Subject) -> None:
    for shape in shapes(subject):
        query, keys, values = inputs(subject, *shape)
        got = attend(subject, round_to(query * 3, subject.dtype), keys, values, 1.0).astype(np.float64)
        each = np.repeat(values, shape[1] // shape[2], axis=1).astype(np.float64)
        largest = np.abs(each).max(axis=0)
        slack = (2 * shape[3] + 3) * 2.0**-23 * largest
        slack += rounding(largest, slack, subject.dtype)
        inside = (got >= each.min(axis=0) - slack) & (got <= each.max(axis=0) + slack)
        true(inside.all(), f"output for the shape {shape}", "between the least and the largest value", got[~inside])


@check("ATTN-06", "attention")
def tokens_may_be_permuted_together(subject: Subject) -> None:
    for shape in shapes(subject):
        query, keys, values = inputs(subject, *shape)
        order = subject.rng.permutation(shape[3])
        _, bound = exact(subject, query, keys, values, scale=0.5)
        got = attend(subject, query, keys[order], values[order])
        within(got, attend(subject, query, keys, values), 2 * bound, "attention over permuted tokens")


@check("ATTN-07a", "attention")
def what_lies_past_the_length_has_no_effect(subject: Subject) -> None:
    query, keys, values = inputs(subject, *fitted(subject, 2, 4, 2, 9, 5))
    for length in (1, 4, 8):
        want, bound = exact(subject, query, keys[:length], values[:length], scale=0.5)
        for poison in (0.0, min(1e30, MAX.get(subject.dtype, 1e30)), np.nan, np.inf):
            bad_keys, bad_values = keys.copy(), values.copy()
            bad_keys[length:], bad_values[length:] = poison, poison
            got = attend(subject, query, bad_keys, bad_values, length=length)
            within(got, want, bound, f"attention over {length} tokens followed by tokens of {poison}")


@check("ATTN-07b", "attention")
def what_a_query_may_not_see_has_no_effect_on_it(subject: Subject) -> None:
    query, keys, values = inputs(subject, *fitted(subject, 4, 2, 2, 6, 5))
    want, bound = exact(subject, query, keys, values, scale=0.5, causal=True)
    keys[5], values[5] = np.nan, np.nan  # only the last query sees token 5
    got = attend(subject, query, keys, values, causal=True)
    within(got[:3], want[:3], bound[:3], "output of the queries before a NaN token")


@check("ATTN-08", "attention")
def no_tokens_give_zeros(subject: Subject) -> None:
    query, keys, values = inputs(subject, *fitted(subject, 3, 4, 2, 5, 6))
    zeros = np.zeros(query.shape, np.float32)
    within(attend(subject, query, keys[:0], values[:0]), zeros, 0.0, "attention over 0 tokens")  # 0 and -0 are equal
    within(attend(subject, query, keys, values, length=0), zeros, 0.0, "attention over 5 tokens with length 0")


@check("ATTN-09", "attention")
def causal_prefill_in_chunks_agrees(subject: Subject) -> None:
    query, keys, values = inputs(subject, *fitted(subject, 9, 4, 2, 9, 8))
    want, bound = exact(subject, query, keys, values, scale=0.5, causal=True)
    within(attend(subject, query, keys, values, causal=True), want, bound, "causal prefill in one call")
    for size in (1, 2, 4):
        for start in range(0, 9, size):
            end = min(start + size, 9)
            got = attend(subject, query[start:end], keys[:end], values[:end], causal=True)
            within(got, want[start:end], bound[start:end], f"causal prefill of the chunk [{start}, {end})")
