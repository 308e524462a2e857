"""TIER: policies and policy changes."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import data_bytes
from kvref_conformance.families.tiered.checks import agree, allowed, append, both, change, tail_of, two_stores
from kvref_conformance.families.tiered.tier_model import TierModel, all_reached, can_go, given, stacked, through, way
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import GGML, GROUPS, IN_GROUPS, SCALED, group_of
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.token_storage import token_bytes
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises, reads, true
from kvref_conformance.testlib.fixtures import (
    at_least,
    formats_of,
    new,
    one_of_each_kind,
    pair_of_tokens,
    random_tokens,
    round_to_input_dtype,
    sample_formats,
    supports,
)
from kvref_conformance.testlib.registry import check


@check("TIER-10a", "tiered")
def a_shorter_tail_migrates_at_once(subject: Subject) -> None:
    for start, then in ((6, 2), (6, 0), (4, 1)):
        allowed(subject, tail_length=then)
        cache, tiers = both(subject, tail_length=start)
        append(subject, cache, tiers, 9)
        change(cache, tiers, tail_length=then)
        agree(subject, cache, tiers, f"after update_policy changed tail_length from {start} to {then}")
        append(subject, cache, tiers, 3)
        agree(subject, cache, tiers, f"3 tokens after update_policy changed tail_length from {start} to {then}")


@check("TIER-10b", "tiered")
def a_longer_tail_fills_with_new_tokens(subject: Subject) -> None:
    allowed(subject, tail_length=5)
    cache, tiers = both(subject, tail_length=2)
    at_least(cache, max_tokens=5)
    append(subject, cache, tiers, 5)
    change(cache, tiers, tail_length=5)
    agree(subject, cache, tiers, "after update_policy lengthened the tail")
    for _ in range(5):
        append(subject, cache, tiers, 1)
        agree(subject, cache, tiers, f"at {tiers.appended} tokens, after update_policy lengthened the tail at 5 tokens")


@check("TIER-10c", "tiered")
def a_new_format_is_for_tokens_that_migrate_later(subject: Subject) -> None:
    q4, q8 = two_stores(subject)
    cache, tiers = both(subject, store_format=q4)
    at_least(cache, max_tokens=6)  # room for a tail and a warm tier
    append(subject, cache, tiers, 7)
    change(cache, tiers, store_format=q8)
    agree(subject, cache, tiers, "after update_policy changed the store format")
    append(subject, cache, tiers, 3)
    agree(subject, cache, tiers, "3 tokens after update_policy changed the store format")
    change(cache, tiers, tail_dtype=tail_of(subject), warm_length=subject.size("warm_length", 2))
    append(subject, cache, tiers, 6)
    agree(subject, cache, tiers, "6 tokens after update_policy changed tail_dtype and warm_length")


@check("TIER-10c", "tiered")
def tokens_of_several_formats_age_alike(subject: Subject) -> None:
    q4, q8 = two_stores(subject)
    wide, *_, narrow = formats_of(subject, "tail_dtype", "float32", "bfloat16", "float16") * 2
    cache, tiers = both(subject, max_tokens=9, store_format=q4)
    for store, tail, count in ((q8, wide, 7), (q4, narrow, 2), (q8, narrow, 1), (q4, wide, 5)):
        append(subject, cache, tiers, count)
        change(cache, tiers, store_format=store, tail_dtype=tail)
        agree(subject, cache, tiers, f"after update_policy changed the store to {store} and the tail to {tail}")
    for count in (6, 1, 8):  # single evictions and migrations that affect tokens of several formats
        append(subject, cache, tiers, count)
        agree(subject, cache, tiers, f"with stored tokens of several formats, after an append of {count} tokens")


@check("TIER-10d", "tiered")
def a_policy_that_makes_no_sense_changes_nothing(subject: Subject) -> None:
    cache, tiers = both(subject)
    append(subject, cache, tiers, 7)
    most = cache.config["max_tokens"]
    wrong: list[dict[str, Any]] = [
        {"tail_length": most + 1}, *({"tail_length": each} for each in subject.integers(-1)), {"store_format": "q5"},
        {"max_tokens": 3}, {"nonsense": 1}, {"tail_length": 1, "store_format": "q5"},
        {"warm_length": 3, "tail_length": most - 2}, {"tail_length": 2, "nonsense": 1},
    ]  # fmt: skip
    for policy in wrong:
        with raises("ConfigError"):
            cache.update_policy(**policy)
        agree(subject, cache, tiers, f"after update_policy with {policy} raised ConfigError")


@check("TIER-10ae", "tiered")
def a_policy_is_looked_at_as_a_whole(subject: Subject) -> None:
    """An update of two fields is valid although an update of either field alone is not."""
    cache, tiers = both(subject, max_tokens=6, tail_length=2, warm_length=4)
    append(subject, cache, tiers, 6)
    for lengths in ({"tail_length": 5, "warm_length": 1}, {"warm_length": 5, "tail_length": 1}):
        allowed(subject, **lengths)
        change(cache, tiers, **lengths)
        agree(subject, cache, tiers, f"after update_policy with {lengths}")
        append(subject, cache, tiers, 2)
        agree(subject, cache, tiers, f"2 tokens after update_policy with {lengths}")


@check("TIER-16", "tiered")
def memory_follows_the_policy(subject: Subject) -> None:
    subject.in_this_process()
    heads, dim = subject.size("num_kv_heads", 8), subject.size("head_dim", 64)
    length = subject.size("tail_length", 2**19 // (heads * dim))
    sizes = {"num_kv_heads": heads, "head_dim": dim, "max_tokens": 2 * length, "tail_length": length}
    cache = new(subject, "tiered", **sizes, tail_dtype=tail_of(subject))
    tail, token = length * heads * dim * 8, np.ones((1, heads, dim), np.float32)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tail_length": length - 24}, {"tail_length": length}), ({"warm_length": 500}, {"warm_length": 512}),
        ({"store_format": "q8"}, {"store_format": "q4"}), ({"tail_dtype": "float16"}, {"tail_dtype": "float32"}),
    ]  # fmt: skip
    both_taken = [each for each in pairs if all(supports(subject, *item) for policy in each for item in policy.items())]
    if not both_taken:
        raise NotOffered("two policies to alternate between, where its limits allow only one")
    for held in ("no token", "tokens in every tier"):
        for policy, back in both_taken:
            memory = list[int]()
            for _ in range(2):
                for each in 40 * (policy, back):
                    cache.update_policy(**each)
                if (size := data_bytes()) is None:
                    raise NotOffered("a system that reports the memory of a process")
                memory.append(size)
            what = f"memory growth in bytes over 40 changes of the policy to {policy} and back, with {held}"
            true(memory[1] - memory[0] < 10 * tail, what, f"less than {10 * tail}", memory[1] - memory[0])
        cache.update_policy(tail_length=subject.size("tail_length", 2), warm_length=subject.size("warm_length", 2))
        for _ in range(6):
            cache.append(token, token)


@check("TIER-14ab", "tiered")
def the_warm_tier_lies_between(subject: Subject) -> None:
    stores = formats_of(subject, "store_format", "q4", "q8")
    for warm, store in zip(formats_of(subject, "warm_format", "q8", "q4"), stores, strict=False):
        cache, tiers = both(subject, tail_length=2, warm_length=3, warm_format=warm, store_format=store, max_tokens=12)
        for count in (2, 1, 1, 5, 1, 4):
            append(subject, cache, tiers, count)
            agree(subject, cache, tiers, f"with a warm tier of 3 in {warm}, after {tiers.appended} tokens")


@check("TIER-15a", "tiered")
def tail_only_quantizes_nothing(subject: Subject) -> None:
    length = subject.size("tail_length", 9)
    cache, (keys, values) = (
        new(subject, "tiered", max_tokens=max(1, length), tail_length=length),
        pair_of_tokens(subject, length + 4),
    )
    if cache.config["max_tokens"] != length or not length:
        raise NotOffered("a cache that consists of the tail only, where its limits do not allow it")
    for start in range(0, length + 4, 2):
        cache.append(keys[start : start + 2], values[start : start + 2])
    dtype = cache.config["tail_dtype"]
    want = (round_to(keys[-length:], dtype), round_to(values[-length:], dtype))
    assert_pair(cache.read(), want, "the tokens of a cache that consists of the tail only")
    assert_equal(cache.stats().store_tokens, 0, "store_tokens in stats of a cache that consists of the tail only")


@check("TIER-15b", "tiered")
def store_only_quantizes_the_input_itself(subject: Subject) -> None:
    allowed(subject, tail_length=0, warm_length=0)
    for name in formats_of(subject, "store_format", "q8", "q4"):
        cache, (keys, values) = new(subject, "tiered", tail_length=0, store_format=name), pair_of_tokens(subject, 7)
        at_least(cache, max_tokens=7)
        cache.append(keys, values)
        want = [stacked(through(given(token), name) for token in part) for part in (keys, values)]
        reads(subject, cache.read(), (want[0], want[1]), f"the tokens of a cache that consists of a {name} store only")
        true(cache.tier_of(6) == "store", "tier of the newest token", "store", cache.tier_of(6))


@check("TIER-15c", "tiered")
def a_store_of_head_rows_scales_each_head(subject: Subject) -> None:
    """The store may use the formats of the quantized cache too, if the implementation supports them."""
    allowed(subject, tail_length=0, warm_length=0)
    cache, (keys, values) = new(subject, "tiered", tail_length=0), pair_of_tokens(subject, 5)
    at_least(cache, max_tokens=5)
    try:
        cache.update_policy(store_format="int8")
    except Exception as error:
        raise NotOffered("an int8 store") from error
    cache.append(keys, values)
    reads(
        subject,
        cache.read(),
        (read_as(keys, "int8"), read_as(values, "int8")),
        "the tokens of a cache that consists of an int8 store only",
    )


# TIER-17, TIER-18: warm tiers and stores in any format that has a scale.

LOUD = 2.0**6
WIDE = 64  # numbers per row: a multiple of most group sizes
REFUSED = 3e9  # larger than the largest float16 scale times the largest code


def pairs(subject: Subject) -> Iterator[dict[str, Any]]:
    """Policies that pair warm and store formats of different kinds at random, each kind once, with a fitting head_dim."""
    names = subject.rng.permutation(one_of_each_kind(subject, "store_format")).tolist()
    for then, first in zip(names[::2], names[1::2] + names[:1], strict=False):
        if not supports(subject, "warm_format", first):
            first = formats_of(subject, "warm_format", *SCALED)[0]
        yield {"warm_format": first, "store_format": then, "head_dim": max(WIDE, group_of(first), group_of(then))}


def come(subject: Subject, cache: ObjectProxy, tiers: TierModel, count: int, loud: float = 1.0) -> None:
    """Append `count` random tokens to the cache and to the oracle."""
    shape = cache.config["num_kv_heads"], cache.config["head_dim"]
    keys, values = (round_to_input_dtype(subject, random_tokens(subject, count, *shape) * loud) for _ in range(2))
    cache.append(keys, values)
    tiers.append(keys, values)


def fresh(subject: Subject, **policy: Any) -> tuple[ObjectProxy, TierModel]:
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
            assert_equal(got, want, f"bytes of {tiers.count(tier)} tokens in the {tier} tier, with {policy}")


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
                    if not supports(subject, "head_dim", dim):
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


def loud_tokens(cache: ObjectProxy, magnitude: float, where: int = 0) -> tuple[NDArray, NDArray]:
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
    for name in sample_formats(subject, formats_of(subject, "store_format", *GGML[:2], *GROUPS))[::2]:
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
