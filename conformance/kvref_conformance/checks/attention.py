"""ATTN: softmax(scale q k') v, and what must not reach it."""

import math
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import same, shaped, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import DIM, HEADS, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.oracle.attention import attention as exact

SHAPES = ((1, 1, 1, 3, 4), (5, 2, 2, 8, 16), (3, 6, 2, 11, 5), (2, 8, 1, 40, 64))  # queries, query heads, kv heads, tokens, dim


def inputs(subject: Subject, queries: int, heads: int, kv_heads: int, count: int, dim: int) -> tuple[NDArray, NDArray, NDArray]:
    def normal(*shape: int) -> NDArray:
        return subject.rng.normal(size=shape).astype(np.float32)

    return normal(queries, heads, dim), normal(count, kv_heads, dim), normal(count, kv_heads, dim)


def attend(subject: Subject, query: NDArray, keys: NDArray, values: NDArray, scale: float = 0.5, **options: Any) -> NDArray:
    options = {"causal": False, "length": len(keys)} | options
    output: NDArray = subject.new("attention").attention(query, keys, values, scale=scale, **options)
    return output


@check("ATTN-01", "attention")
def each_head_reads_its_group(subject: Subject) -> None:
    for kv_heads, heads in ((2, 2), (2, 6), (1, 4), (3, 6)):
        keys, values = np.zeros((1, kv_heads, 4), np.float32), np.zeros((1, kv_heads, 4), np.float32)
        values[0] = np.arange(kv_heads)[:, None]
        got = attend(subject, np.zeros((2, heads, 4), np.float32), keys, values)
        want = [[[head // (heads // kv_heads)] * 4 for head in range(heads)]] * 2
        same(got, np.array(want, np.float32), f"output of {heads} query heads over {kv_heads} kv heads of value 0, 1, ...")


@check("ATTN-01", "attention")
def weights_are_the_softmax_of_scaled_scores(subject: Subject) -> None:
    query, keys = np.array([[[1.0]]], np.float32), np.array([[[0.0]], [[1.0]]], np.float32)
    values = np.array([[[0.0]], [[1.0]]], np.float32)
    for scale in (0.0, 1.0, 2.5, -1.0):
        got = attend(subject, query, keys, values, scale)
        within(got, [[[1 / (1 + math.exp(-scale))]]], 1e-6, f"the second token's weight at scale {scale}")


@check("ATTN-01", "attention")
def the_output_is_as_wide_as_the_values(subject: Subject) -> None:
    for heads, kv_heads, width in ((2, 2, 3), (6, 2, 9), (4, 1, 1)):
        query, keys, _ = inputs(subject, 3, heads, kv_heads, 7, 5)
        values = subject.rng.normal(size=(7, kv_heads, width)).astype(np.float32)
        want, bound = exact(query, keys, values, scale=0.5)
        within(attend(subject, query, keys, values), want, bound, f"attention over keys of 5 elements and values of {width}")


@check("ATTN-02", "attention")
def one_token_gives_its_value_back(subject: Subject) -> None:
    for shape in SHAPES:
        query, keys, values = inputs(subject, *shape)
        group = shape[1] // shape[2]
        want = np.broadcast_to(np.repeat(values[:1], group, axis=1), (shape[0], shape[1], shape[4]))
        same(attend(subject, query, keys[:1], values[:1]), want, "attention over one token")


@check("ATTN-03", "attention")
def large_scores_do_not_overflow(subject: Subject) -> None:
    query, keys, values = inputs(subject, 2, 2, 2, 6, 4)
    for factor in (100.0, 1e4, -1e4):
        got = attend(subject, query * np.float32(factor), keys, values, 1.0)
        true(np.isfinite(got).all(), f"output with queries * {factor}", "finite values", got)
    tied = attend(
        subject, np.full((1, 1, 1), 1e18, np.float32), np.full((4, 1, 1), 1e18, np.float32), np.ones((4, 1, 1), np.float32)
    )
    within(tied, [[[1.0]]], 1e-6, "output of four equal, enormous scores")


@check("ATTN-03", "attention")
@np.errstate(over="ignore", invalid="ignore")  # numbers beyond float32 are the point
def what_float32_cannot_hold_gives_nan_or_the_exact_output(subject: Subject) -> None:
    for query, keys, exactly in (
        (1e20, [-1e20], 7.0), (1e20, [1e20], 7.0), (1e20, [-1e20, -2e20], 7.0), (1e20, [1e20, 2e20], 8.0), (1e20, [0, 1e20], 8.0),
        (1.0, [-np.inf], np.nan), (1.0, [-np.inf, -np.inf], np.nan), (1.0, [np.inf], np.nan), (1.0, [-np.inf, 1.0], 8.0),
    ):  # fmt: skip
        values = np.arange(7, 7 + len(keys), dtype=np.float32)
        q, k, v = (np.array(part, np.float32).reshape(-1, 1, 1) for part in (query, keys, values))
        got = float(attend(subject, q, k, v, 1.0)[0, 0, 0])
        true(np.isnan(got) or got == exactly, f"output of query {query} over keys {keys}", f"{exactly} or NaN", got)


@check("ATTN-04", "attention")
def output_is_within_the_bound_of_exact(subject: Subject) -> None:
    for shape in SHAPES:
        for causal in (False, True):
            query, keys, values = inputs(subject, *shape)
            for scale in (1 / math.sqrt(shape[4]), 3.0):
                want, bound = exact(query, keys, values, scale=scale, causal=causal)
                within(attend(subject, query, keys, values, scale, causal=causal), want, bound, f"attention {shape}")


@check("ATTN-05", "attention")
def output_lies_among_the_values(subject: Subject) -> None:
    for shape in SHAPES:
        query, keys, values = inputs(subject, *shape)
        got = attend(subject, query * 3, keys, values, 1.0).astype(np.float64)
        each = np.repeat(values, shape[1] // shape[2], axis=1).astype(np.float64)
        slack = (2 * shape[3] + 3) * 2.0**-23 * np.abs(each).max(axis=0)
        inside = (got >= each.min(axis=0) - slack) & (got <= each.max(axis=0) + slack)
        true(inside.all(), f"outputs {shape}", "between the least and the largest value", got[~inside])


@check("ATTN-06", "attention")
def tokens_may_be_permuted_together(subject: Subject) -> None:
    for shape in SHAPES:
        query, keys, values = inputs(subject, *shape)
        order = subject.rng.permutation(shape[3])
        _, bound = exact(query, keys, values, scale=0.5)
        got = attend(subject, query, keys[order], values[order])
        within(got, attend(subject, query, keys, values), 2 * bound, "attention over permuted tokens")


@check("ATTN-07", "attention")
def what_lies_past_the_length_has_no_effect(subject: Subject) -> None:
    query, keys, values = inputs(subject, 2, 4, 2, 9, 5)
    for length in (1, 4, 8):
        want, bound = exact(query, keys[:length], values[:length], scale=0.5)
        for poison in (0.0, 1e30, np.nan, np.inf):
            bad_keys, bad_values = keys.copy(), values.copy()
            bad_keys[length:], bad_values[length:] = poison, poison
            got = attend(subject, query, bad_keys, bad_values, length=length)
            within(got, want, bound, f"attention over {length} tokens with {poison} past them")


@check("ATTN-07", "attention")
def what_a_query_may_not_see_has_no_effect_on_it(subject: Subject) -> None:
    query, keys, values = inputs(subject, 4, 2, 2, 6, 5)
    want, bound = exact(query, keys, values, scale=0.5, causal=True)
    keys[5], values[5] = np.nan, np.nan  # seen by the last query alone
    got = attend(subject, query, keys, values, causal=True)
    within(got[:3], want[:3], bound[:3], "the queries before a token that is not a number")


@check("ATTN-08", "attention")
def no_tokens_give_zeros(subject: Subject) -> None:
    query, keys, values = inputs(subject, 3, 4, 2, 5, 6)
    zeros = np.zeros((3, 4, 6), np.float32)
    same(attend(subject, query, keys[:0], values[:0]), zeros, "attention over no tokens")
    same(attend(subject, query, keys, values, length=0), zeros, "attention over 5 tokens of which none counts")


@check("ATTN-09", "attention")
def causal_prefill_in_chunks_agrees(subject: Subject) -> None:
    query, keys, values = inputs(subject, 9, 4, 2, 9, 8)
    want, bound = exact(query, keys, values, scale=0.5, causal=True)
    within(attend(subject, query, keys, values, causal=True), want, bound, "causal prefill in one piece")
    for size in (1, 2, 4):
        for start in range(0, 9, size):
            end = min(start + size, 9)
            got = attend(subject, query[start:end], keys[:end], values[:end], causal=True)
            within(got, want[start:end], bound[start:end], f"causal prefill of tokens {start}..{end}")


@check("ATTN-10", "paged")
def attention_over_pages_is_over_what_they_read_as(subject: Subject) -> None:
    cache = new(subject, "paged")
    other, sequence = cache.create(), cache.create()
    for at in (0, 4):
        for one in (other, sequence):
            cache.write(one, 0, at, *pair_of_tokens(subject, 4))
    query = subject.rng.normal(size=(2, 2 * HEADS, DIM)).astype(np.float32)
    want, bound = exact(query, *cache.gather(sequence, 0), scale=0.5)
    within(cache.attend(sequence, 0, query, 0.5), want, bound, "attention over a sequence in pages")


@check("ATTN-10", "quantized")
def attention_over_codes_is_over_what_they_read_as(subject: Subject) -> None:
    for name in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new(subject, "quantized", format=name)
        for _ in range(7):
            cache.append_step(*pair_of_tokens(subject, 2))
        query = subject.rng.normal(size=(1, 2 * HEADS, DIM)).astype(np.float32)
        want, bound = exact(query, *cache.read_tokens(1, list(range(7))), scale=0.5)
        within(cache.attend(1, query, 0.5), want, bound, f"attention over {name} tokens")


@check("ATTN-10", "tiered")
def attention_over_tiers_is_over_what_they_read_as(subject: Subject) -> None:
    cache = new(subject, "tiered", warm_length=2)
    query = subject.rng.normal(size=(1, 2 * HEADS, DIM)).astype(np.float32)
    same(cache.attend(query, 0.5), np.zeros((1, 2 * HEADS, DIM), np.float32), "attention over an empty cache")
    cache.append(*pair_of_tokens(subject, 13))
    want, bound = exact(query, *cache.read(), scale=0.5)
    got = shaped(cache.attend(query, 0.5), (1, 2 * HEADS, DIM), "attention over tiers")
    within(got, want, bound, "attention over tiers")
