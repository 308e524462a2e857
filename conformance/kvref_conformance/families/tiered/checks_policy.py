"""TIER: policies and policy changes."""

from typing import Any

import numpy as np

from kvref_conformance.checking.expect import equal, pair, raises, reads, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, new, pair_of_tokens, takes
from kvref_conformance.conversation.drivers.guard import data_bytes
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import agree, allowed, append, both, change, tail_of, two_stores
from kvref_conformance.families.tiered.tiers import given, stacked, through
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.oracle.rows import read_as
from kvref_conformance.outcome import NotOffered


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
    both_taken = [each for each in pairs if all(takes(subject, *item) for policy in each for item in policy.items())]
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
    pair(cache.read(), want, "the tokens of a cache that consists of the tail only")
    equal(cache.stats().store_tokens, 0, "store_tokens in stats of a cache that consists of the tail only")


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
