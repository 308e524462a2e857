"""Checks of ATTN: softmax(scale q k') v, and tokens that must have no effect on it."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import output_rounding, visible_positions, weight_rounding
from kvref_conformance.oracle.formats.small_floats import MAX, round_to
from kvref_conformance.testlib.assertions import (
    LOUD_SCALE,
    KeptResults,
    assert_same,
    assert_shape,
    assert_true,
    assert_within,
    blaming,
    expected_attention,
    keys_loud_at_view_ends,
    normal_rows,
    one_hot_queries,
    raises,
)
from kvref_conformance.testlib.fixtures import random_pair, random_tokens, strided_view
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import HEAD_DIMS, power_of_two_edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.thread_stress import NUM_THREADS, assert_threads_do_not_interfere

Shape = tuple[int, int, int, int, int]  # queries, query heads, kv heads, tokens, dim
SHAPES = ((1, 1, 1, 3, 4), (5, 2, 2, 8, 16), (3, 6, 2, 11, 5), (2, 8, 1, 40, 64))


def nearest_shape(subject: Subject, queries: int, heads: int, kv_heads: int, count: int, dim: int) -> Shape:
    """Returns the nearest shape within the limits."""
    group, kv_heads = subject.size("group_size", heads // kv_heads), subject.size("num_kv_heads", kv_heads)
    return queries, kv_heads * group, kv_heads, count, subject.size("head_dim", dim)


def nearest_shapes(subject: Subject) -> list[Shape]:
    """Returns SHAPES, each changed to the nearest shape within the limits."""
    return [nearest_shape(subject, *shape) for shape in SHAPES]


def inputs(subject: Subject, queries: int, heads: int, kv_heads: int, count: int, dim: int) -> tuple[NDArray, NDArray, NDArray]:
    shapes = (queries, heads, dim), (count, kv_heads, dim), (count, kv_heads, dim)
    query, keys, values = (normal_rows(subject, *shape) for shape in shapes)
    return query, keys, values


def first_elements(subject: Subject, *numbers: float) -> NDArray:
    """Returns float32 [n, num_kv_heads, dim]: tokens whose first element is given and whose others are 0."""
    tokens = np.zeros((len(numbers), subject.size("num_kv_heads", 1), subject.size("head_dim", 1)), np.float32)
    tokens[..., 0] = round_to(np.array(numbers), subject.dtype)[:, None]
    return tokens


def repeat_for_group(subject: Subject, rows: NDArray, group: int = 1) -> NDArray:
    """Returns the rows of each kv head repeated for the query heads that read it."""
    return np.repeat(rows, subject.size("group_size", group), axis=1)


def attend(subject: Subject, query: NDArray, keys: NDArray, values: NDArray, scale: float = 0.5, **options: Any) -> NDArray:
    options = {"causal": False, "length": len(keys)} | options
    output: NDArray = subject.new("attention").attention(query, keys, values, scale=scale, **options)
    return output


@check("ATTN-01a", "attention")
def query_head_reads_the_kv_head_of_its_group(subject: Subject) -> None:
    for wanted_kv_heads, wanted in ((2, 2), (2, 6), (1, 4), (3, 6)):
        _, heads, kv_heads, _, dim = nearest_shape(subject, 2, wanted, wanted_kv_heads, 1, 4)
        keys, values = np.zeros((1, kv_heads, dim), np.float32), np.zeros((1, kv_heads, dim), np.float32)
        values[0] = np.arange(kv_heads)[:, None]
        got = attend(subject, np.zeros((2, heads, dim), np.float32), keys, values)
        want = [[[head // (heads // kv_heads)] * dim for head in range(heads)]] * 2
        assert_same(
            got, np.array(want, np.float32), f"output of {heads} query heads over {kv_heads} kv heads of values 0, 1, ..."
        )


@check("ATTN-01a", "attention")
def attention_weights_are_the_softmax_of_scaled_scores(subject: Subject) -> None:
    tokens = first_elements(subject, 0.0, 1.0)
    for scale in (0.0, 1.0, 2.5, -1.0):
        got = attend(subject, repeat_for_group(subject, tokens[1:]), tokens, tokens, scale)
        want = repeat_for_group(subject, tokens[1:]) / (1 + math.exp(-scale))
        bound = 1e-6 + output_rounding(want, np.zeros(1), subject.dtype)
        if subject.limits.switch("attention", "rounded_weights"):
            bound = bound + weight_rounding(repeat_for_group(subject, tokens[1:]), tokens, tokens, subject.dtype, scale=scale)
        assert_within(got, want, bound, f"weight of the second token at scale {scale}")


@check("ATTN-01b", "attention")
def attention_output_is_as_wide_as_the_values(subject: Subject) -> None:
    other_widths = 0
    for heads, kv_heads, wanted in ((2, 2, 3), (6, 2, 9), (4, 1, 1)):
        shape, width = nearest_shape(subject, 3, heads, kv_heads, 7, 5), subject.size("head_dim", wanted)
        dim = shape[4] if shape[4] != width else subject.size("head_dim", 99)  # another width, as far away as the limits allow
        query, keys, _ = inputs(subject, *shape[:4], dim)
        values = normal_rows(subject, 7, shape[2], width)
        want, bound = expected_attention(subject, query, keys, values, scale=0.5)
        got = attend(subject, query, keys, values)
        assert_within(got, want, bound, f"attention over keys of {dim} elements and values of {width}")
        other_widths += dim != width
    if not other_widths:
        raise NotOffered(f"values of another width than keys: its limits allow only {width}")


@check("ATTN-02", "attention")
def attention_over_one_token_returns_its_value(subject: Subject) -> None:
    for shape in nearest_shapes(subject):
        query, keys, values = inputs(subject, *shape)
        group = shape[1] // shape[2]
        want = np.broadcast_to(np.repeat(values[:1], group, axis=1), (shape[0], shape[1], shape[4]))
        assert_same(attend(subject, query, keys[:1], values[:1]), want, "attention over one token")


@check("ATTN-03a", "attention")
def attention_with_large_scores_is_finite(subject: Subject) -> None:
    query, keys, values = inputs(subject, *nearest_shape(subject, 2, 2, 2, 6, 4))
    for factor in (100.0, 1e4, -1e4):
        fits = np.abs(query).max() * abs(factor) <= MAX.get(subject.dtype, np.inf)  # otherwise the scale is that large
        large = round_to(query * np.float32(factor if fits else 1.0), subject.dtype)
        for scale in (1.0, -1.0):  # with a negative scale, the largest product has the least score
            got = attend(subject, large, keys, values, scale * (1.0 if fits else factor))
            assert_true(np.isfinite(got).all(), f"output with queries * {factor} at scale {scale}", "finite values", got)
    number, scale = root_and_scale(subject, 1e36)
    tokens, ones = first_elements(subject, *[number] * 4), first_elements(subject, *[1.0] * 4)
    tied = attend(subject, repeat_for_group(subject, tokens[:1]), tokens, ones, 0.5 * scale)
    assert_within(tied, repeat_for_group(subject, ones[:1]), 1e-6, "output over four tokens with equal, large scores")


@check("ATTN-03b", "attention")
@np.errstate(over="ignore", invalid="ignore")  # the check uses scores beyond float32
def attention_with_scores_beyond_float32_returns_nan_or_the_exact_output(subject: Subject) -> None:
    large, scale = root_and_scale(subject, 1e40)
    for query, keys, exactly in (
        (large, [-large], 7.0), (large, [large], 7.0), (large, [-large, -2 * large], 7.0), (large, [large, 2 * large], 8.0),
        (large, [0, large], 8.0), (1.0, [-np.inf], np.nan), (1.0, [-np.inf, -np.inf], np.nan), (1.0, [np.inf], np.nan),
        (1.0, [-np.inf, 1.0], 8.0),
    ):  # fmt: skip
        values = first_elements(subject, *range(7, 7 + len(keys)))
        q = repeat_for_group(subject, first_elements(subject, query))
        got = float(attend(subject, q, first_elements(subject, *keys), values, scale if query == large else 1.0)[0, 0, 0])
        assert_true(np.isnan(got) or got == exactly, f"output of query {query} over keys {keys}", f"{exactly} or NaN", got)


def root_and_scale(subject: Subject, product: float) -> tuple[float, float]:
    """Returns x and scale with x * x * scale == product, such that the dtype can represent 2 * x."""
    number = math.sqrt(product)
    if number * 2 <= MAX.get(subject.dtype, np.inf):
        return number, 1.0
    return 2.0**14, product / 2.0**28


@check("ATTN-04", "attention")
def attention_is_within_the_bound(subject: Subject) -> None:
    for shape in nearest_shapes(subject):
        for causal in (False, True):
            query, keys, values = inputs(subject, *shape)
            for scale in (1 / math.sqrt(shape[4]), 3.0):
                want, bound = expected_attention(subject, query, keys, values, scale=scale, causal=causal)
                got = attend(subject, query, keys, values, scale, causal=causal)
                assert_within(got, want, bound, f"output for the shape {shape}")


@check("ATTN-05", "attention")
def attention_output_is_between_the_values(subject: Subject) -> None:
    for shape in nearest_shapes(subject):
        query, keys, values = inputs(subject, *shape)
        got = attend(subject, round_to(query * 3, subject.dtype), keys, values, 1.0).astype(np.float64)
        each = np.repeat(values, shape[1] // shape[2], axis=1).astype(np.float64)
        largest = np.abs(each).max(axis=0)
        slack = (2 * shape[3] + 3) * 2.0**-23 * largest
        if subject.limits.switch("attention", "rounded_weights"):
            slack = slack + weight_rounding(round_to(query * 3, subject.dtype), keys, values, subject.dtype, scale=1.0).max(
                axis=0
            )
        slack += output_rounding(largest, slack, subject.dtype)
        inside = (got >= each.min(axis=0) - slack) & (got <= each.max(axis=0) + slack)
        assert_true(inside.all(), f"output for the shape {shape}", "between the least and the largest value", got[~inside])


@check("ATTN-06", "attention")
def attention_does_not_depend_on_the_order_of_tokens(subject: Subject) -> None:
    for shape in nearest_shapes(subject):
        query, keys, values = inputs(subject, *shape)
        order = subject.rng.permutation(shape[3])
        _, bound = expected_attention(subject, query, keys, values, scale=0.5)
        got = attend(subject, query, keys[order], values[order])
        assert_within(got, attend(subject, query, keys, values), 2 * bound, "attention over permuted tokens")


@check("ATTN-07a", "attention")
def attention_ignores_tokens_past_the_length(subject: Subject) -> None:
    query, keys, values = inputs(subject, *nearest_shape(subject, 2, 4, 2, 9, 5))
    for length in (1, 4, 8):
        want, bound = expected_attention(subject, query, keys[:length], values[:length], scale=0.5)
        for poison in (0.0, min(1e30, MAX.get(subject.dtype, 1e30)), np.nan, np.inf):
            bad_keys, bad_values = keys.copy(), values.copy()
            bad_keys[length:], bad_values[length:] = poison, poison
            got = attend(subject, query, bad_keys, bad_values, length=length)
            assert_within(got, want, bound, f"attention over {length} tokens followed by tokens of {poison}")


@check("ATTN-07b", "attention")
def causal_attention_ignores_later_tokens(subject: Subject) -> None:
    query, keys, values = inputs(subject, *nearest_shape(subject, 4, 2, 2, 6, 5))
    want, bound = expected_attention(subject, query, keys, values, scale=0.5, causal=True)
    keys[5], values[5] = np.nan, np.nan  # only the last query sees token 5
    got = attend(subject, query, keys, values, causal=True)
    assert_within(got[:3], want[:3], bound[:3], "output of the queries before a NaN token")


@check("ATTN-07a", "attention")
def attention_with_very_low_scores_ignores_tokens_past_the_length(subject: Subject) -> None:
    for length in (1, 3):
        assert_hidden_below_low_scores(
            subject, f"attention over {length} of 5 tokens", partial(attend, subject, length=length), [range(length)] * 5
        )


@check("ATTN-07b", "attention")
def causal_attention_with_very_low_scores_ignores_later_tokens(subject: Subject) -> None:
    views = [range(at + 1) for at in range(5)]
    assert_hidden_below_low_scores(subject, "causal attention", partial(attend, subject, causal=True), views)


def assert_hidden_below_low_scores(
    subject: Subject, what: str, call: Callable[..., NDArray], views: Sequence[Sequence[int] | NDArray]
) -> None:
    """Checks `call(query, keys, values, scale=...)` if all scores are lower than the number that a mask uses for minus infinity.

    The scores are equal, so that the output is the mean of the values that a query sees. views: one per token.
    """
    values = first_elements(subject, *4.0 ** np.arange(len(views)))
    want = repeat_for_group(subject, np.array([values[list(view)].mean(axis=0) for view in views], np.float32))
    bound = 1e-6 * want + output_rounding(want, np.zeros(1), subject.dtype)
    for product in (2.0**15, 1e20, 1e37):
        number, scale = root_and_scale(subject, product)
        if scale != 1:
            continue  # the dtype has no such number, and a query times this scale can overflow it
        tokens = first_elements(subject, *[number] * len(views))
        got = call(repeat_for_group(subject, tokens), -tokens, values, scale=scale)
        assert_within(got, want, bound, f"{what}, whose scores are all -{product}")


@check("ATTN-08", "attention")
def attention_over_no_tokens_returns_zeros(subject: Subject) -> None:
    query, keys, values = inputs(subject, *nearest_shape(subject, 3, 4, 2, 5, 6))
    zeros = np.zeros(query.shape, np.float32)
    assert_within(attend(subject, query, keys[:0], values[:0]), zeros, 0.0, "attention over 0 tokens")  # 0 and -0 are equal
    assert_within(attend(subject, query, keys, values, length=0), zeros, 0.0, "attention over 5 tokens with length 0")


@check("ATTN-08", "attention")
def causal_attention_of_queries_before_the_first_token_returns_zeros(subject: Subject) -> None:
    """With more queries than tokens, the first queries see no token, and the others see the tokens up to their own."""
    query, keys, values = inputs(subject, *nearest_shape(subject, 7, 4, 2, 5, 6))
    got = attend(subject, query, keys, values, causal=True)
    want, bound = expected_attention(subject, query[2:], keys, values, scale=0.5, causal=True)
    assert_within(got[:2], np.zeros_like(query[:2]), 0.0, "attention of 2 queries before the first of 5 tokens")
    assert_within(got[2:], want, bound, "attention of the queries of 5 tokens, after 2 queries before the first")


@check("LAW-15", "attention")
def attention_accepts_views(subject: Subject) -> None:
    query, (keys, values) = query_of(subject, 2), random_pair(subject, 4)
    want, bound = expected_attention(subject, query, keys, values, scale=0.5)
    with blaming("ATTN-01"):
        assert_within(attend(subject, query, keys, values, length=4), want, bound, "attention with arrays that are no views")
    views = [strided_view(subject, part) for part in (query, keys, values)]
    got = subject.new("attention").attention(*views, scale=0.5, causal=False, length=4)
    assert_within(got, want, bound, "attention with strided views")


@check("ATTN-09", "attention")
def causal_attention_in_chunks_equals_one_call(subject: Subject) -> None:
    query, keys, values = inputs(subject, *nearest_shape(subject, 9, 4, 2, 9, 8))
    want, bound = expected_attention(subject, query, keys, values, scale=0.5, causal=True)
    assert_within(attend(subject, query, keys, values, causal=True), want, bound, "causal prefill in one call")
    for size in (1, 2, 4):
        for start in range(0, 9, size):
            end = min(start + size, 9)
            got = attend(subject, query[start:end], keys[:end], values[:end], causal=True)
            assert_within(got, want[start:end], bound[start:end], f"causal prefill of the chunk [{start}, {end})")


# Checks of LAW-10, LAW-16 and LAW-20 for this family.


def query_of(subject: Subject, count: int) -> NDArray:
    """Returns float32 [count, num_query_heads, dim], with one query head per kv head if the limits allow it."""
    return random_tokens(subject, count, heads=subject.heads * subject.size("group_size", 1))


@check("LAW-16", "attention")
def attention_does_not_modify_its_arguments(subject: Subject) -> None:
    subject.require_same_process()
    arguments = {"query": query_of(subject, 2), "keys": random_tokens(subject, 4), "values": random_tokens(subject, 4)}
    own = {name: subject.to_own_array(rows) for name, rows in arguments.items()}
    subject.new("attention").attention(*own.values(), scale=0.5, causal=True, length=3)
    for name, rows in arguments.items():
        assert_same(subject.numpy(own[name].array), rows, f"the input {name}, after attention")


@check("LAW-17", "attention")
def attention_outputs_stay_after_later_calls(subject: Subject) -> None:
    kept, kernel = KeptResults(subject), subject.new("attention")
    for number in range(3):
        query, (keys, values) = query_of(subject, 2), random_pair(subject, 4)
        kept.add(f"attention call {number}", kernel.as_is("attention", query, keys, values, scale=0.5, causal=False, length=4))
    kept.assert_unchanged()


@check("LAW-21a", "attention")
def attention_in_threads_equals_attention_alone(subject: Subject) -> None:
    kernel = subject.new("attention")

    def attention(query: NDArray, keys: NDArray, values: NDArray) -> list[NDArray]:
        return [kernel.attention(query, keys, values, scale=0.5, causal=True, length=len(keys))]

    shape = nearest_shape(subject, 3, 4, 2, 60, 32)
    calls = [[partial(attention, *inputs(subject, *shape))] for _ in range(NUM_THREADS)]
    assert_threads_do_not_interfere(subject, calls, "attention")


@check("LAW-10", "attention")
def attention_with_wrong_shapes_raises(subject: Subject) -> None:
    query, keys, values, heads = query_of(subject, 1), random_tokens(subject, 4), random_tokens(subject, 4), subject.heads
    wide, fewer = random_tokens(subject, 4, dim=subject.dim + 1), random_tokens(subject, 3)
    uneven, other_heads = np.append(query, query[:, :1], axis=1), random_tokens(subject, 4, heads=heads - 1 or 2)
    flat, empty = values[..., 0], slice(0)
    for wrong in ((query, wide, values), (query, keys, fewer), (uneven, keys, values), (query[0], keys, values),
                  (query, keys, other_heads), (query, keys, flat), (query[..., empty], keys[..., empty], values),
                  (query, keys, values[..., empty])):  # fmt: skip
        if wrong[0] is uneven and heads == 1:
            continue  # any number of query heads can read one kv head
        with raises("ShapeMismatch"):
            subject.new("attention").attention(*wrong, scale=1.0, causal=False, length=4)


@check("LAW-20", "attention")
def attention_accepts_every_integer_type(subject: Subject) -> None:
    query, (keys, values) = query_of(subject, 1), random_pair(subject, 120)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        given = {"scale": 1.0, "causal": False, "length": 100}
        yield "attention over 100 tokens", typed.call(subject.new("attention"), "attention", query, keys, values, **given)

    assert_same_for_integer_types(subject, script)


# Checks of LAW-18: attention at production sizes, with inputs in which a single missing token changes the result.


def assert_attention(subject: Subject, queries: int, heads: tuple[int, int], length: int, dim: int, padding: int = 3) -> None:
    """Checks attention over `length` tokens followed by padding. heads: numbers of query heads and of kv heads."""
    _, query_heads, kv_heads, _, dim = nearest_shape(subject, queries, *heads, length, dim)
    query = normal_rows(subject, queries, query_heads, dim)
    keys, values = (normal_rows(subject, length + padding, kv_heads, dim) for _ in range(2))
    keys[length:], values[length:] = np.nan, np.nan
    scale, causal = 1 / math.sqrt(dim), 1 < queries <= length and not padding
    got = attend(subject, query, keys, values, scale, causal=causal, length=length)
    want, bound = expected_attention(subject, query, keys[:length], values[:length], scale=scale, causal=causal)
    assert_within(got, want, bound, f"attention of {queries} x {query_heads} over {length} x {kv_heads} x {dim}")


@check("LAW-18", "attention")
def attention_at_production_sizes_is_within_the_bound(subject: Subject) -> None:
    for length in power_of_two_edges(1025):
        assert_attention(subject, 1, (4, 2), length, 64)
    assert_attention(subject, 1, (2, 1), 4097, 64)
    for dim in HEAD_DIMS:
        for heads in ((8, 2), (12, 12), (16, 2), (7, 1)):
            assert_attention(subject, 1, heads, 130, dim)
    for heads in ((10, 2), (18, 3), (28, 4), (18, 2), (40, 8)):
        for queries in (1, 3):
            assert_attention(subject, queries, heads, 40, 64, padding=3 if queries == 1 else 0)
    for queries in (15, 17, 63, 65, 127, 129):  # prompts that end inside a tile, or at its end
        assert_attention(subject, queries, (2, 1), queries + 40, 64, padding=0)


@check("LAW-18", "attention", real=True)
def attention_with_the_sizes_of_models_is_within_the_bound(subject: Subject) -> None:
    for heads, dim in (((32, 8), 128), ((8, 4), 256), ((32, 32), 96), ((12, 12), 64), ((16, 1), 576)):
        for length in (4095, 4097):
            assert_attention(subject, 1, heads, length, dim)
    assert_attention(subject, 33, (32, 8), 300, 128, padding=0)
    assert_attention(subject, 1, (8, 1), 16_385, 128)


# Checks of WIN for attention functions: windows, sink tokens, chunks and logit sinks.

SINKS = (-math.inf, 0.0, 1.5, -3.0, 20.0, 1000.0, -1000.0)


def sizes(queries: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields (queries, tokens): the given queries, one per token, and one."""
    yield from ((queries, count), (count, count), (1, count))


def assert_window_attention(subject: Subject, queries: int, count: int, window: int, sinks: int = 0, chunk: int = 0) -> None:
    """Checks windowed attention over random tokens."""
    query, keys, values = inputs(subject, *nearest_shape(subject, queries, 4, 2, count, 8))
    got = subject.new("attention").window_attention(query, keys, values, scale=0.5, window=window, sinks=sinks, chunk=chunk)
    views = [visible_positions(at, window, sinks, chunk) for at in range(count - queries, count)]
    want, bound = expected_attention(subject, query, keys, values, scale=0.5, views=views)
    words = f"a window of {window}" + f", {sinks} sinks" * bool(sinks) + f", chunks of {chunk}" * bool(chunk)
    assert_within(got, want, bound, f"attention of the last {queries} of {count} tokens, with {words}")


def assert_window_hides(subject: Subject, window: int, sinks: int = 0, chunk: int = 0) -> None:
    """Checks windowed attention over tokens with very low scores."""
    call = partial(subject.new("attention").window_attention, window=window, sinks=sinks, chunk=chunk)
    views = [visible_positions(at, window, sinks, chunk) for at in range(5)]
    assert_hidden_below_low_scores(subject, f"attention with a window of {window}, {sinks} sinks, chunks of {chunk}", call, views)


@check("WIN-01", "attention")
def window_attention_counts_the_token_of_the_query(subject: Subject) -> None:
    for window in (1, 2, 5, 12, 13, 40):
        for queries, count in sizes(5, 12):
            assert_window_attention(subject, queries, count, window)
    assert_window_hides(subject, window=2)


@check("WIN-05ac", "attention")
def window_attention_includes_the_sinks(subject: Subject) -> None:
    for window, sinks in ((3, 2), (1, 4), (5, 11), (5, 12), (2, 1)):
        for queries, count in sizes(5, 12):
            assert_window_attention(subject, queries, count, window, sinks)
    assert_window_hides(subject, window=2, sinks=1)


@check("WIN-07", "attention")
def window_attention_with_chunks_starts_at_a_chunk_boundary(subject: Subject) -> None:
    for chunk in (4, 1, 5, 12, 13):
        for queries, count in (*sizes(5, 12), *sizes(2, 13)):
            assert_window_attention(subject, queries, count, chunk, chunk=chunk)
    assert_window_hides(subject, window=2, chunk=2)


@check("WIN-08", "attention")
def sink_attention_adds_one_logit_per_query_head_to_the_softmax(subject: Subject) -> None:
    for queries, count in ((1, 1), (3, 9), (1, 200)):
        for sinks in (*((sink,) for sink in SINKS), SINKS[1:]):  # the same logit for all heads, then different ones
            for causal in (False, True):
                query, keys, values = inputs(subject, *nearest_shape(subject, queries, 4, 2, count, 8))
                sink = round_to(np.resize(np.array(sinks, np.float32), query.shape[1]), subject.dtype)
                got = subject.new("attention").sink_attention(query, keys, values, scale=0.5, causal=causal, logit_sink=sink)
                want, bound = expected_attention(subject, query, keys, values, scale=0.5, causal=causal, logit_sink=sink)
                what = f"attention of {queries} queries over {count} tokens, with logit sinks {sink.tolist()}"
                assert_within(got, want, bound, what)


@check("LAW-18", "attention")
def window_attention_reads_both_ends_of_its_window(subject: Subject) -> None:
    for count, window, sinks, chunk in ((1300, 512, 0, 0), (700, 255, 4, 0), (1100, 256, 0, 256), (300, 299, 0, 0)):
        assert_views(subject, 66, count, window, sinks, chunk)


@check("LAW-18", "attention", real=True)
def window_attention_reads_both_ends_of_the_windows_of_models(subject: Subject) -> None:
    for count, window, sinks, chunk in ((9000, 4096, 0, 0), (5000, 1024, 128, 0), (16_400, 8192, 0, 8192)):
        assert_views(subject, 130, count, window, sinks, chunk)


def assert_views(subject: Subject, queries: int, count: int, window: int, sinks: int, chunk: int) -> None:
    """Checks that some of the last queries see exactly the tokens in their view, at both ends."""
    _, heads, kv_heads, _, dim = nearest_shape(subject, queries, 4, 2, count, 64)
    rows = sorted({0, 1, 15, 16, 63, 64, queries - 2, queries - 1})[:dim]
    views = [visible_positions(count - queries + row, window, sinks, chunk) for row in rows]
    keys, values = keys_loud_at_view_ends(count, kv_heads, dim, views), normal_rows(subject, count, kv_heads, dim)
    query = one_hot_queries([rows.index(row) if row in rows else None for row in range(queries)], heads, dim)
    got = subject.new("attention").window_attention(
        query, keys, values, scale=LOUD_SCALE, window=window, sinks=sinks, chunk=chunk
    )
    want, bound = expected_attention(subject, query[rows], keys, values, scale=LOUD_SCALE, views=views)
    what = f"attention of queries {rows} of the last {queries} of {count} tokens, with a window of {window}"
    assert_within(assert_shape(got, query.shape, what)[rows], want, bound, f"{what}, {sinks} sinks and chunks of {chunk}")
