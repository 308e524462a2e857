"""TIER-17, TIER-18: warm tiers and stores in any format that has a scale."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, few, formats_of, held, one_of_each_kind, takes, tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import agree, both, change, tail_of
from kvref_conformance.families.tiered.tiers import Tiers, all_reached, can_go, way
from kvref_conformance.oracle.formats import GGML, GROUPS, IN_GROUPS, SCALED, group_of
from kvref_conformance.oracle.tokens import token_bytes
from kvref_conformance.outcome import NotOffered

LOUD = 2.0**6
WIDE = 64  # numbers per row: a multiple of most group sizes
REFUSED = 3e9  # larger than the largest float16 scale times the largest code


def pairs(subject: Subject) -> Iterator[dict[str, Any]]:
    """Policies that pair warm and store formats of different kinds at random, each kind once, with a fitting head_dim."""
    names = subject.rng.permutation(one_of_each_kind(subject, "store_format")).tolist()
    for then, first in zip(names[::2], names[1::2] + names[:1], strict=False):
        if not takes(subject, "warm_format", first):
            first = formats_of(subject, "warm_format", *SCALED)[0]
        yield {"warm_format": first, "store_format": then, "head_dim": max(WIDE, group_of(first), group_of(then))}


def come(subject: Subject, cache: Handle, tiers: Tiers, count: int, loud: float = 1.0) -> None:
    """Append `count` random tokens to the cache and to the oracle."""
    shape = cache.config["num_kv_heads"], cache.config["head_dim"]
    keys, values = (held(subject, tokens(subject, count, *shape) * loud) for _ in range(2))
    cache.append(keys, values)
    tiers.append(keys, values)


def fresh(subject: Subject, **policy: Any) -> tuple[Handle, Tiers]:
    """An empty cache and an empty oracle with the same policy."""
    cache, tiers = both(subject, **policy)
    if tiers.tokens:
        raise NotOffered("tiers this short, where its limits do not allow them")
    return cache, tiers


@check("TIER-17abd", "tiered")
def tokens_move_through_any_formats(subject: Subject) -> None:
    """Large tokens follow small ones, in batches of several lengths, until the first tokens are evicted."""
    for policy in pairs(subject):
        cache, tiers = fresh(subject, tail_length=2, warm_length=3, max_tokens=9, **policy)
        for count, loud in ((4, 1.0), (1, LOUD), (5, 1 / LOUD), (7, LOUD)):
            come(subject, cache, tiers, subject.size("tokens", count), loud)
            agree(subject, cache, tiers, f"with {policy}, after {tiers.appended} tokens")
        stats, shape = cache.stats(), (cache.config["num_kv_heads"], cache.config["head_dim"])
        for tier, got in (("warm", stats.warm_bytes), ("store", stats.store_bytes)):
            want = 2 * tiers.count(tier) * token_bytes(*shape, cache.config[f"{tier}_format"])
            equal(got, want, f"bytes of {tiers.count(tier)} tokens in the {tier} tier, with {policy}")


@check("TIER-17bc", "tiered")
def a_new_format_leaves_what_is_stored(subject: Subject) -> None:
    for policy in pairs(subject):
        cache, tiers = fresh(subject, tail_length=1, warm_length=2, max_tokens=8, **policy)
        come(subject, cache, tiers, subject.size("tokens", 6))
        change(cache, tiers, warm_format=policy["store_format"], store_format=policy["warm_format"])
        agree(subject, cache, tiers, f"after update_policy exchanged the formats of {policy}")
        come(subject, cache, tiers, subject.size("tokens", 4), LOUD)
        agree(subject, cache, tiers, f"4 tokens after update_policy exchanged the formats of {policy}")
        change(cache, tiers, store_format=policy["store_format"])
        cache.clear()
        tiers.tokens, tiers.appended = [], 0
        come(subject, cache, tiers, subject.size("tokens", 5))
        agree(subject, cache, tiers, f"after clear and an append of 5 tokens, with {policy}")


@check("TIER-17b", "tiered")
def newest_tokens_go_with_their_scales(subject: Subject) -> None:
    """Case: there is no tail, and the removed tokens caused no migration."""
    for name in one_of_each_kind(subject, "store_format"):
        policy = {"store_format": name, "head_dim": max(WIDE, group_of(name))}
        cache, tiers = fresh(subject, tail_length=0, max_tokens=9, **policy)
        at_least(cache, max_tokens=6)
        come(subject, cache, tiers, subject.size("tokens", 4))
        before = [*tiers.tokens]
        come(subject, cache, tiers, subject.size("tokens", 2), LOUD)
        cache.truncate(len(before))
        tiers.tokens, tiers.appended = before, len(before)
        agree(subject, cache, tiers, f"in a {name} store, after truncate removed tokens of larger magnitude")
        come(subject, cache, tiers, subject.size("tokens", 2), 1 / LOUD)
        agree(subject, cache, tiers, f"in a {name} store, after smaller tokens replaced truncated tokens of larger magnitude")


@check("TIER-17e", "tiered")
def a_head_dim_that_no_group_goes_into_is_refused(subject: Subject) -> None:
    tried = 0
    for tier in ("warm_format", "store_format"):
        with suppress(NotOffered):
            for name in formats_of(subject, tier, *IN_GROUPS)[::23]:
                cache, _ = fresh(subject, **{tier: name, "head_dim": 2 * group_of(name)})
                for dim in (group_of(name) + 1, group_of(name) // 2):
                    if not takes(subject, "head_dim", dim):
                        continue
                    tried += 1
                    with raises("ConfigError"):
                        subject.new("tiered", **cache.config | {"head_dim": dim})
                    narrow, tiers = fresh(subject, head_dim=dim)
                    come(subject, narrow, tiers, 1)
                    with raises("ConfigError"):
                        narrow.update_policy(**{tier: name})
                    agree(subject, narrow, tiers, f"after update_policy to {name} raised ConfigError for a head_dim of {dim}")
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")


def loud_tokens(cache: Handle, magnitude: float, where: int = 0) -> tuple[NDArray, NDArray]:
    """A token of ones, except for one number of its key or of its value."""
    shape = (1, cache.config["num_kv_heads"], cache.config["head_dim"])
    pair = np.ones(shape, np.float32), np.ones(shape, np.float32)
    pair[where][0, -1, -1] = magnitude
    return pair


def wide_tail(subject: Subject) -> str:
    """A tail dtype with a larger range than float16 scales."""
    if subject.dtype == "float16":
        raise NotOffered("input values larger than float16 can represent")
    return tail_of(subject, "float32", "bfloat16")


@check("TIER-18ab", "tiered")
def what_a_tier_of_the_policy_could_not_hold_is_refused(subject: Subject) -> None:
    """A token that some tier cannot store is rejected. A later tier quantizes the dequantized rows of the tier before it."""
    for which, policy in enumerate(pairs(subject)):
        cache, tiers = fresh(subject, tail_length=2, warm_length=which % 2 * 2, tail_dtype=wide_tail(subject), **policy)
        ways = way(tiers.policy)
        for where, magnitude in enumerate((REFUSED, -1e20, -1e5, 1e8)):
            pair = loud_tokens(cache, magnitude, where % 2)
            goes = can_go(pair[where % 2], ways)
            if goes is False and all_reached(tiers.policy):
                with raises("NonFinite"):
                    cache.append(*pair)
            elif goes:
                cache.append(*pair)
                tiers.append(*pair)
        agree(subject, cache, tiers, f"with {policy}, after appends of large tokens that every tier can store")
        come(subject, cache, tiers, subject.size("tokens", 5))
        agree(subject, cache, tiers, f"with {policy}, after large tokens migrated")


@check("TIER-18c", "tiered")
def a_policy_that_would_lose_a_token_is_refused(subject: Subject) -> None:
    wide = formats_of(subject, "store_format", *(name for name in SCALED if name not in IN_GROUPS))[0]
    tried = 0
    for name in few(subject, formats_of(subject, "store_format", *GGML[:2], *GROUPS))[::2]:
        cache, tiers = fresh(
            subject, tail_length=3, tail_dtype=wide_tail(subject), store_format=wide, head_dim=max(WIDE, group_of(name))
        )  # fmt: skip
        if can_go(loud_tokens(cache, REFUSED)[0], [name]) is not False or not all_reached(tiers.policy):
            continue
        at_least(cache, max_tokens=tiers.policy["tail_length"] + 5, tail_length=1)
        tried += 1
        come(subject, cache, tiers, 1)
        pair = loud_tokens(cache, REFUSED)
        cache.append(*pair)
        tiers.append(*pair)
        for policy in ({"store_format": name}, {"store_format": name, "tail_length": subject.size("tail_length", 1)}):
            with raises("NonFinite"):
                cache.update_policy(**policy)
            agree(
                subject, cache, tiers, f"after update_policy to {policy} raised NonFinite, with a value of {REFUSED} in the tail"
            )
        for _ in range(tiers.policy["tail_length"] + 1):
            come(subject, cache, tiers, 1)
        agree(subject, cache, tiers, f"after a value of {REFUSED} migrated to a {wide} store")
        change(cache, tiers, store_format=name)
        come(subject, cache, tiers, subject.size("tokens", 3))
        agree(subject, cache, tiers, f"after update_policy to a {name} store, with a value of {REFUSED} already stored in {wide}")
    if not tried:
        raise NotOffered("a store format whose scales have a smaller range than float32")
