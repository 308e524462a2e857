"""Checks of MLA-02: attention with absorbed matrices equals attention with expanded keys and values."""

from functools import partial

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import may_raise, same, shaped, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held, new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.checks import dtypes, filled, given, plain
from kvref_conformance.families.latent.known import Heads, attends, exact, of_cache

SHAPES = ((1, 1, 3, 2), (5, 2, 8, 5), (3, 6, 11, 1), (2, 3, 18, 9))  # queries, heads, tokens, value_dim


@check("MLA-02ab", "latent")
def output_is_within_the_bound_of_exact(subject: Subject) -> None:
    for sizes in dtypes(subject):
        for queries, wanted, count, value in SHAPES:
            cache, _ = filled(subject, count, **sizes)
            heads = of_cache(subject, cache, count=wanted, value=value)
            for causal in (False, True):
                for times in (1.0, 3.0):
                    attends(
                        subject, cache, heads.query(subject, queries), heads,
                        f"attention of {queries} queries x {len(heads.up_keys)} heads over {count} {cache.config['dtype']} rows",
                        scale=times * heads.scale, causal=causal,
                    )  # fmt: skip


@check("MLA-02a", "latent")
def matrices_that_are_square_are_not_turned(subject: Subject) -> None:
    cache, _ = filled(subject, 6, **plain(subject))
    rank = cache.config["rank"]
    heads = of_cache(subject, cache, nope=rank, value=rank)
    attends(subject, cache, heads.query(subject, 2), heads, f"attention with up_keys of shape {list(heads.up_keys.shape)}")


@check("MLA-02a", "latent")
def sums_are_added_up_in_float32(subject: Subject) -> None:
    """With positive numbers only, the bound is narrow. The rounding error of a sum in half precision exceeds it by far."""
    for count in (1, 2, 9):
        cache = new(subject, "latent", **plain(subject))
        rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
        above = partial(above_zero, subject)
        cache.append(above(count, rank), above(count, rope_dim))
        sizes = (subject.size(name, wanted) for name, wanted in (("group_size", 3), ("nope_dim", 40), ("value_dim", 9)))
        number, nope, value = sizes
        heads = Heads(above(number, nope, rank), above(number, value, rank), rope_dim)
        query = above(2, number, heads.width)
        scale = 8 / (nope * rank)
        attends(subject, cache, query, heads, f"attention over {count} tokens of positive numbers", scale=scale)


def above_zero(subject: Subject, *shape: int) -> NDArray:
    """Returns float32 numbers in [0.5, 1.5)."""
    return held(subject, subject.rng.uniform(0.5, 1.5, size=shape))


@check("MLA-02b", "latent")
def causal_prefill_in_chunks_agrees(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, (latent, rope) = filled(subject, 9, **sizes)
        heads = of_cache(subject, cache)
        query = heads.query(subject, 9)
        want, bound = exact(subject, query, cache.read(), heads, scale=heads.scale, causal=True)
        for size in (9, 1, 2, 4):
            cache.clear()
            for start in range(0, 9, size):
                end = min(start + size, 9)
                cache.append(latent[start:end], rope[start:end])
                got = cache.attend(query[start:end], heads.up_keys, heads.up_values, heads.scale, True)
                within(
                    got, want[start:end], bound[start:end], f"causal attention of tokens [{start}, {end}), in chunks of {size}"
                )


@check("MLA-02c", "latent")
def no_tokens_give_zeros(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject))
    heads = of_cache(subject, cache)
    zeros = np.zeros((3, *heads.up_values.shape[:2]), np.float32)
    for causal in (False, True):
        got = cache.attend(heads.query(subject, 3), heads.up_keys, heads.up_values, heads.scale, causal)
        within(got, zeros, 0.0, "attention over 0 tokens")


@check("MLA-02d", "latent")
def what_a_query_does_not_see_has_no_effect(subject: Subject) -> None:
    """Appends a later token that is NaN or infinite, if the cache accepts it."""
    for sizes in dtypes(subject):
        for value in (np.nan, np.inf):
            cache, _ = filled(subject, 5, **sizes)
            heads, rows = of_cache(subject, cache), cache.read()
            with may_raise("NonFinite"):
                cache.append(*(np.full_like(part, value) for part in given(subject, cache, 1)))
                query, what = heads.query(subject, 3), f"causal attention of the two queries before a token of {value}"
                want, bound = exact(subject, query[:2], rows, heads, scale=heads.scale, causal=True)
                got = cache.attend(query, heads.up_keys, heads.up_values, heads.scale, True)
                within(shaped(got, (3, *want.shape[1:]), what)[:2], want, bound, what)


@check("MLA-02a", "latent")
def attending_changes_nothing(subject: Subject) -> None:
    cache, _ = filled(subject, 4, **plain(subject))
    before, heads = cache.read(), of_cache(subject, cache)
    query = heads.query(subject, 2)
    first = attends(subject, cache, query, heads, "attention")
    same(cache.read(), before, "rows after attention")
    _, bound = exact(subject, query, before, heads, scale=heads.scale)
    within(
        attends(subject, cache, query, heads, "attention, second call"),
        first,
        2 * bound,
        "attention of a second call, compared with the first",
    )
