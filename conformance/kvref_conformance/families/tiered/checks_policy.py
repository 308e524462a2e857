"""TIER: policies and policy changes."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import data_bytes
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.tiered.fixture import TieredFixture, need_support, tail_dtype, two_store_formats
from kvref_conformance.families.tiered.tier_model import can_store, reaches_store, reads_by_age, remaining_formats
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import FORMATS_IN_GROUPS, GGML_FORMATS, GROUP_FORMATS, SCALED_FORMATS, group_of
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.token_storage import token_bytes
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_reads, assert_true, raises
from kvref_conformance.testlib.fixtures import (
    new_object,
    one_format_per_kind,
    random_pair,
    require_sizes,
    sample_formats,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.registry import check


@check("TIER-10a", "tiered")
def update_policy_with_a_shorter_tail_migrates_tokens_at_once(subject: Subject) -> None:
    for length, shorter in ((6, 2), (6, 0), (4, 1)):
        need_support(subject, tail_length=shorter)
        run = TieredFixture(subject, tail_length=length)
        run.append(9)
        run.cache.update_policy(tail_length=shorter)
        run.look()
        position = run.appended - 1 - shorter
        assert_true((tier := run.cache.tier_of(position)) != "tail", f"tier of position {position}", "warm or store", tier)
        run.append(3)


@check("TIER-10b", "tiered")
def update_policy_with_a_longer_tail_leaves_old_tokens_in_the_store(subject: Subject) -> None:
    need_support(subject, tail_length=5)
    run = TieredFixture(subject, tail_length=2)
    require_sizes(run.cache, max_tokens=5)
    run.append(5)
    run.cache.update_policy(tail_length=5)
    run.look()
    run.append(1, 1, 1, 1, 1)


@check("TIER-10c", "tiered")
def update_policy_applies_a_new_format_to_tokens_that_migrate_later(subject: Subject) -> None:
    q4, q8 = two_store_formats(subject)
    run = TieredFixture(subject, store_format=q4)
    require_sizes(run.cache, max_tokens=6)  # room for a tail and a warm tier
    run.append(7)
    before = run.cache.read()
    run.cache.update_policy(store_format=q8)
    assert_pair(run.cache.read(), before, "tokens after update_policy changed the store format")
    run.append(3)
    run.cache.update_policy(tail_dtype=tail_dtype(subject), warm_length=subject.size("warm_length", 2))
    run.append(6)


@check("TIER-10c", "tiered")
def update_policy_to_several_formats_in_turn_keeps_each_token_in_its_own(subject: Subject) -> None:
    q4, q8 = two_store_formats(subject)
    wide, *_, narrow = supported_formats(subject, "tail_dtype", "float32", "bfloat16", "float16") * 2
    run = TieredFixture(subject, max_tokens=9, store_format=q4)
    for store, tail, count in ((q8, wide, 7), (q4, narrow, 2), (q8, narrow, 1), (q4, wide, 5)):
        run.append(count)
        run.cache.update_policy(store_format=store, tail_dtype=tail)
        run.look()
    run.append(6, 1, 8)  # single evictions and migrations that affect tokens of several formats


@check("TIER-10d", "tiered")
def update_policy_to_an_invalid_policy_raises(subject: Subject) -> None:
    run = TieredFixture(subject)
    run.append(7)
    most = run.config["max_tokens"]
    wrong: list[dict[str, Any]] = [
        {"tail_length": most + 1}, *({"tail_length": each} for each in subject.integers(-1)), {"store_format": "q5"},
        {"max_tokens": 3}, {"nonsense": 1}, {"tail_length": 1, "store_format": "q5"},
        {"warm_length": 3, "tail_length": most - 2}, {"tail_length": 2, "nonsense": 1},
    ]  # fmt: skip
    for policy in wrong:
        with raises("ConfigError"):
            run.cache.update_policy(**policy)
        run.look()


@check("TIER-10ae", "tiered")
def update_policy_applies_its_settings_together(subject: Subject) -> None:
    """An update of two fields is valid although an update of either field alone is not."""
    run = TieredFixture(subject, max_tokens=6, tail_length=2, warm_length=4)
    run.append(6)
    for lengths in ({"tail_length": 5, "warm_length": 1}, {"warm_length": 5, "tail_length": 1}):
        need_support(subject, **lengths)
        run.cache.update_policy(**lengths)
        run.look()
        run.append(2)


@check("TIER-16", "tiered")
def update_policy_frees_memory(subject: Subject) -> None:
    subject.require_same_process()
    heads, dim = subject.size("num_kv_heads", 8), subject.size("head_dim", 64)
    length = subject.size("tail_length", 2**19 // (heads * dim))
    sizes = {"num_kv_heads": heads, "head_dim": dim, "max_tokens": 2 * length, "tail_length": length}
    cache = new_object(subject, "tiered", **sizes, tail_dtype=tail_dtype(subject))
    tail, token = length * heads * dim * 8, np.ones((1, heads, dim), np.float32)
    policies: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tail_length": length - 24}, {"tail_length": length}), ({"warm_length": 500}, {"warm_length": 512}),
        ({"store_format": "q8"}, {"store_format": "q4"}), ({"tail_dtype": "float16"}, {"tail_dtype": "float32"}),
    ]  # fmt: skip
    policies = [each for each in policies if all(supports(subject, *item) for policy in each for item in policy.items())]
    if not policies:
        raise NotOffered("two policies to alternate between, where its limits allow only one")
    for contents in ("no token", "tokens in every tier"):
        for policy, back in policies:
            memory = list[int]()
            for _ in range(2):
                for each in 40 * (policy, back):
                    cache.update_policy(**each)
                if (size := data_bytes()) is None:
                    raise NotOffered("a system that reports the memory of a process")
                memory.append(size)
            what = f"memory growth in bytes over 40 changes of the policy to {policy} and back, with {contents}"
            assert_true(memory[1] - memory[0] < 10 * tail, what, f"less than {10 * tail}", memory[1] - memory[0])
        cache.update_policy(tail_length=subject.size("tail_length", 2), warm_length=subject.size("warm_length", 2))
        for _ in range(6):
            cache.append(token, token)


@check("TIER-14ab", "tiered")
def append_moves_tokens_from_the_tail_to_the_warm_tier_to_the_store(subject: Subject) -> None:
    stores = supported_formats(subject, "store_format", "q4", "q8")
    for warm, store in zip(supported_formats(subject, "warm_format", "q8", "q4"), stores, strict=False):
        run = TieredFixture(subject, tail_length=2, warm_length=3, warm_format=warm, store_format=store, max_tokens=12)
        keys, values = run.append(2, 1, 1, 5, 1, 4)
        want = reads_by_age(keys, run.config), reads_by_age(values, run.config)
        assert_reads(subject, [part[-len(want[0].values) :] for part in run.cache.read()], want, "the newest tokens")


@check("TIER-15a", "tiered")
def append_to_a_cache_of_a_tail_only_quantizes_nothing(subject: Subject) -> None:
    length = subject.size("tail_length", 9)
    cache = new_object(subject, "tiered", max_tokens=max(1, length), tail_length=length)
    keys, values = random_pair(subject, length + 4)
    if cache.config["max_tokens"] != length or not length:
        raise NotOffered("a cache that consists of the tail only, where its limits do not allow it")
    for start in range(0, length + 4, 2):
        cache.append(keys[start : start + 2], values[start : start + 2])
    dtype = cache.config["tail_dtype"]
    want = round_to(keys[-length:], dtype), round_to(values[-length:], dtype)
    assert_pair(cache.read(), want, "the tokens of a cache that consists of the tail only")
    assert_equal(cache.stats().store_tokens, 0, "store_tokens in stats of a cache that consists of the tail only")


@check("TIER-15b", "tiered")
def append_to_a_cache_of_a_store_only_quantizes_its_arguments(subject: Subject) -> None:
    need_support(subject, tail_length=0, warm_length=0)
    for name in supported_formats(subject, "store_format", "q8", "q4"):
        cache, (keys, values) = new_object(subject, "tiered", tail_length=0, store_format=name), random_pair(subject, 7)
        require_sizes(cache, max_tokens=7)
        cache.append(keys, values)
        want = reads_by_age(keys, cache.config), reads_by_age(values, cache.config)
        assert_reads(subject, cache.read(), want, f"the tokens of a cache that consists of a {name} store only")
        assert_true(cache.tier_of(6) == "store", "tier of the newest token", "store", cache.tier_of(6))


@check("TIER-15c", "tiered")
def append_to_an_int8_store_scales_each_head(subject: Subject) -> None:
    """The store may use the formats of the quantized cache too, if the implementation supports them."""
    need_support(subject, tail_length=0, warm_length=0)
    cache, (keys, values) = new_object(subject, "tiered", tail_length=0), random_pair(subject, 5)
    require_sizes(cache, max_tokens=5)
    try:
        cache.update_policy(store_format="int8")
    except Exception as error:
        raise NotOffered("an int8 store") from error
    cache.append(keys, values)
    assert_reads(
        subject,
        cache.read(),
        (read_as(keys, "int8"), read_as(values, "int8")),
        "the tokens of a cache that consists of an int8 store only",
    )


# TIER-17, TIER-18: warm tiers and stores in any format that has a scale.

LOUD = 2.0**6
WIDE = 64  # numbers per row: a multiple of most group sizes
REFUSED = 3e9  # larger than the largest float16 scale times the largest code


def format_pairs(subject: Subject) -> Iterator[dict[str, Any]]:
    """Policies that pair warm and store formats of different kinds at random, each kind once, with a fitting head_dim."""
    names = subject.rng.permutation(one_format_per_kind(subject, "store_format")).tolist()
    for store, warm in zip(names[::2], names[1::2] + names[:1], strict=False):
        if not supports(subject, "warm_format", warm):
            warm = supported_formats(subject, "warm_format", *SCALED_FORMATS)[0]
        yield {"warm_format": warm, "store_format": store, "head_dim": max(WIDE, group_of(warm), group_of(store))}


def empty_cache(subject: Subject, **policy: Any) -> TieredFixture:
    run = TieredFixture(subject, **policy)
    if len(run):
        raise NotOffered("tiers this short, where its limits do not allow them")
    return run


@check("TIER-17ab", "tiered")
def append_stores_each_token_in_the_formats_of_its_tiers(subject: Subject) -> None:
    """Large tokens follow small ones, in batches of several lengths, until the first tokens are evicted."""
    for policy in format_pairs(subject):
        run = empty_cache(subject, tail_length=2, warm_length=3, max_tokens=9, **policy)
        for count, factor in ((4, 1.0), (1, LOUD), (5, 1 / LOUD), (7, LOUD)):
            run.append(subject.size("tokens", count), factor=factor)


@check("TIER-17d", "tiered")
def stats_count_the_bytes_of_each_format(subject: Subject) -> None:
    for policy in format_pairs(subject):
        cache = new_object(subject, "tiered", tail_length=2, warm_length=3, max_tokens=9, **policy)
        shape = cache.config["num_kv_heads"], cache.config["head_dim"]
        cache.append(*random_pair(subject, 7, *shape))
        stats = cache.stats()
        tiers = ("warm", stats.warm_tokens, stats.warm_bytes), ("store", stats.store_tokens, stats.store_bytes)
        for tier, count, got in tiers:
            want = 2 * count * token_bytes(*shape, cache.config[f"{tier}_format"])
            assert_equal(got, want, f"bytes of {count} tokens in the {tier} tier, with {policy}")


@check("TIER-17bc", "tiered")
def update_policy_to_other_formats_keeps_stored_tokens(subject: Subject) -> None:
    for policy in format_pairs(subject):
        run = empty_cache(subject, tail_length=1, warm_length=2, max_tokens=8, **policy)
        run.append(subject.size("tokens", 6))
        before = run.cache.read()
        run.cache.update_policy(warm_format=policy["store_format"], store_format=policy["warm_format"])
        assert_pair(run.cache.read(), before, f"tokens after update_policy exchanged the formats of {policy}")
        run.append(subject.size("tokens", 4), factor=LOUD)
        run.cache.update_policy(store_format=policy["store_format"])
        run.cache.clear()
        run.append(subject.size("tokens", 5))


@check("TIER-17b", "tiered")
def truncate_removes_the_scales_of_its_tokens(subject: Subject) -> None:
    """Case: there is no tail, and the removed tokens caused no migration."""
    for name in one_format_per_kind(subject, "store_format"):
        run = empty_cache(subject, tail_length=0, max_tokens=9, store_format=name, head_dim=max(WIDE, group_of(name)))
        require_sizes(run.cache, max_tokens=6)
        run.append(subject.size("tokens", 4))
        before = run.cache.read()
        run.append(subject.size("tokens", 2), factor=LOUD)
        run.cache.truncate(len(before[0]))
        assert_pair(run.cache.read(), before, f"tokens in a {name} store, after truncate removed tokens of larger magnitude")
        run.append(subject.size("tokens", 2), factor=1 / LOUD)


@check("TIER-17e", "tiered")
def new_and_update_policy_with_a_head_dim_that_does_not_fit_the_format_raise(subject: Subject) -> None:
    tried = 0
    for tier in ("warm_format", "store_format"):
        with suppress(NotOffered):
            for name in supported_formats(subject, tier, *FORMATS_IN_GROUPS)[::23]:
                config = empty_cache(subject, **{tier: name, "head_dim": 2 * group_of(name)}).config
                for dim in (group_of(name) + 1, group_of(name) // 2):
                    if not supports(subject, "head_dim", dim):
                        continue
                    tried += 1
                    with raises("ConfigError"):
                        subject.new("tiered", **config | {"head_dim": dim})
                    run = empty_cache(subject, head_dim=dim)
                    run.append(1)
                    with raises("ConfigError"):
                        run.cache.update_policy(**{tier: name})
                    run.look()
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")


def loud_tokens(run: TieredFixture, magnitude: float, part: int = 0) -> tuple[NDArray, NDArray]:
    """A token of ones, except for one number of its key (part 0) or of its value (part 1)."""
    shape = (1, run.config["num_kv_heads"], run.config["head_dim"])
    pair = np.ones(shape, np.float32), np.ones(shape, np.float32)
    pair[part][0, -1, -1] = magnitude
    return pair


def wide_tail_dtype(subject: Subject) -> str:
    """A tail dtype with a larger range than float16 scales."""
    if subject.dtype == "float16":
        raise NotOffered("input values larger than float16 can represent")
    return tail_dtype(subject, "float32", "bfloat16")


@check("TIER-18ab", "tiered")
def append_of_a_token_that_a_later_tier_cannot_store_raises(subject: Subject) -> None:
    """A later tier quantizes the dequantized rows of the tier before it."""
    for number, policy in enumerate(format_pairs(subject)):
        warm = number % 2 * 2
        run = empty_cache(subject, tail_length=2, warm_length=warm, tail_dtype=wide_tail_dtype(subject), **policy)
        formats = remaining_formats(run.config)
        for part, magnitude in enumerate((REFUSED, -1e20, -1e5, 1e8)):
            pair = loud_tokens(run, magnitude, part % 2)
            fits = can_store(pair[part % 2], formats)
            if fits is False and reaches_store(run.config):
                with raises("NonFinite"):
                    run.cache.append(*pair)
            elif fits:
                run.cache.append(*pair)
        run.look()
        run.append(subject.size("tokens", 5))


@check("TIER-18c", "tiered")
def update_policy_to_a_format_that_cannot_store_a_token_raises(subject: Subject) -> None:
    wide = supported_formats(subject, "store_format", *(name for name in SCALED_FORMATS if name not in FORMATS_IN_GROUPS))[0]
    tried = 0
    for name in sample_formats(subject, supported_formats(subject, "store_format", *GGML_FORMATS[:2], *GROUP_FORMATS))[::2]:
        sizes = {"tail_length": 3, "tail_dtype": wide_tail_dtype(subject), "head_dim": max(WIDE, group_of(name))}
        run = empty_cache(subject, **sizes, store_format=wide)
        if can_store(loud_tokens(run, REFUSED)[0], [name]) is not False or not reaches_store(run.config):
            continue
        length = run.config["tail_length"]
        require_sizes(run.cache, max_tokens=length + 5, tail_length=1)
        tried += 1
        run.append(1)
        run.cache.append(*loud_tokens(run, REFUSED))
        for policy in ({"store_format": name}, {"store_format": name, "tail_length": subject.size("tail_length", 1)}):
            with raises("NonFinite"):
                run.cache.update_policy(**policy)
            run.look()
        run.append(*[1] * (length + 1))  # the value migrates
        run.cache.update_policy(store_format=name)
        run.append(subject.size("tokens", 3))
    if not tried:
        raise NotOffered("a store format whose scales have a smaller range than float32")


@check("TIER-18c", "tiered")
def update_policy_to_a_format_that_cannot_store_a_token_of_the_warm_tier_raises(subject: Subject) -> None:
    need_support(subject, tail_length=0, warm_length=3)
    wide = supported_formats(subject, "store_format", *(name for name in SCALED_FORMATS if name not in FORMATS_IN_GROUPS))[0]
    if not supports(subject, "warm_format", wide):
        raise NotOffered(f"a warm tier in {wide}")
    tried = 0
    for name in sample_formats(subject, supported_formats(subject, "store_format", *GGML_FORMATS[:2], *GROUP_FORMATS))[::2]:
        sizes = {"tail_length": 0, "tail_dtype": wide_tail_dtype(subject), "warm_length": 3, "max_tokens": 9}
        sizes["head_dim"] = max(WIDE, group_of(name))
        run = empty_cache(subject, **sizes, warm_format=wide, store_format=wide)
        if can_store(loud_tokens(run, REFUSED)[0], [name]) is not False or not reaches_store(run.config):
            continue
        require_sizes(run.cache, max_tokens=5)
        tried += 1
        run.append(1)
        run.cache.append(*loud_tokens(run, REFUSED))
        for policy in ({"store_format": name}, {"store_format": name, "warm_length": subject.size("warm_length", 1)}):
            with raises("NonFinite"):
                run.cache.update_policy(**policy)
            run.look()
    if not tried:
        raise NotOffered("a store format whose scales have a smaller range than float32")
