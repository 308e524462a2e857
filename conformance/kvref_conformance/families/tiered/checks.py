"""TIER: the tier of each token, its dequantized rows, and what can be appended. EDIT-06 and MOVE-01."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import to_call_error
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families.tiered.fixture import TieredFixture, need_support, tail_dtype
from kvref_conformance.families.tiered.law_adapter import TieredLawAdapter
from kvref_conformance.families.tiered.tier_model import can_store, reads_by_age
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import AFFINE_FORMATS, PLAIN_FORMATS, SYMMETRIC_FORMATS
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_reads,
    assert_same,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import (
    assert_config_error,
    clamp_to_limits,
    new_object,
    random_pair,
    random_tokens,
    require_sizes,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, assert_content, content_pair
from kvref_conformance.testlib.thread_stress import NUM_THREADS, Calls, assert_threads_do_not_interfere, run_in_threads


@check("TIER-01", "tiered")
def append_puts_the_newest_tokens_into_the_tail(subject: Subject) -> None:
    for dtype in supported_formats(subject, "tail_dtype", "float16", "bfloat16", "float32"):
        run = TieredFixture(subject, tail_dtype=dtype)
        appended = run.append(1, 2, 1, 1, 6, 1)
        count = min(run.config["tail_length"], len(appended[0]))
        got, want = ([part[len(part) - count :] for part in pair] for pair in (run.cache.read(), appended))
        assert_pair(got, (round_to(want[0], dtype), round_to(want[1], dtype)), f"the newest {count} tokens, in a {dtype} tail")


@check("TIER-02", "tiered")
def append_leaves_quantized_tokens_as_they_are(subject: Subject) -> None:
    for name in supported_formats(subject, "store_format", "q8", "q4"):
        run = TieredFixture(subject, store_format=name)
        require_sizes(run.cache, max_tokens=10)  # so that some of the tokens stored first remain
        run.append(6)
        before, stored = run.cache.read(), run.model.tiers.count("store")
        run.append(1, 1, 1, 1, 1)
        evicted = run.appended - len(run)
        keys, values = (part[: stored - evicted] for part in run.cache.read())
        assert_pair(
            (keys, values),
            (before[0][evicted:stored], before[1][evicted:stored]),
            f"tokens in a {name} store, read again after more tokens were appended",
        )


@check("TIER-03", "tiered")
def read_returns_the_oldest_tokens_first(subject: Subject) -> None:
    run = TieredFixture(subject, max_tokens=9)
    keys, values = run.append(3, 1, 1, 4, 1, 7, 1, 1, 1)  # wraps around every buffer of 4 and 9
    want = reads_by_age(keys, run.config), reads_by_age(values, run.config)
    got = [part[-len(want[0].values) :] for part in run.cache.read()]
    assert_reads(subject, got, want, "the newest tokens")


@check("TIER-04", "tiered")
def migration_batch_does_not_change_what_read_returns(subject: Subject) -> None:
    tokens, results = random_pair(subject, 19), list[Any]()
    for batch in (1, 2, 3, 64):
        run = TieredFixture(subject, migration_batch=batch)
        run.append_parts(*tokens, 7, 1, 1, 9, 1)
        results.append([part[-19:] for part in run.cache.read()])
        assert_pair(results[-1], results[0], f"tokens with migration_batch {batch}, compared with migration_batch 1")


@check("TIER-05a", "tiered")
def append_evicts_the_oldest_tokens(subject: Subject) -> None:
    run = TieredFixture(subject, max_tokens=7)
    most = run.config["max_tokens"]
    for count in (most - 1, 1, 1, 3, most, 2):
        run.append(count)
        assert_equal(run.cache.total_tokens, min(most, run.appended), f"number of tokens, at most {most}")


@check("TIER-05b", "tiered")
def append_of_more_tokens_than_fit_keeps_the_last_ones(subject: Subject) -> None:
    for times, more in ((1, 0), (1, 1), (2, 1), (4, 2)):
        run = TieredFixture(subject, max_tokens=7)
        most = run.config["max_tokens"]
        run.append(2, times * most + more)
        assert_equal(run.cache.total_tokens, most, f"number of tokens after an append of {times * most + more}")


@check("TIER-06", "tiered")
def total_tokens_is_the_sum_of_the_tiers(subject: Subject) -> None:
    for tail in (0, 2, 6):  # with tail_length 6 = max_tokens, tokens are evicted from the tail
        cache = new_object(subject, "tiered", max_tokens=6, tail_length=tail)
        most = cache.config["max_tokens"]
        for appended in range(1, 2 * most):
            cache.append(*random_pair(subject, 1))
            stats = cache.stats()
            total = stats.tail_tokens + stats.warm_tokens + stats.store_tokens
            assert_equal(
                (stats.total_tokens, cache.total_tokens, total),
                (min(most, appended),) * 3,
                f"total_tokens in stats, total_tokens and the sum of the tiers after {appended} tokens",
            )
            assert_equal(
                len(cache.read()[0]), min(most, appended), f"number of tokens that read returned after {appended} tokens"
            )


@check("TIER-07ab", "tiered")
def tier_of_counts_positions_from_the_first_token(subject: Subject) -> None:
    run = TieredFixture(subject, max_tokens=9, tail_length=2, warm_length=3)
    tail, warm = run.config["tail_length"], run.config["warm_length"]
    for count in (4, 3, 1, 6):
        run.cache.append(*run.random_tokens(count))
        first = run.appended - len(run)
        for age, position in enumerate(reversed(range(first, run.appended))):
            tier = "tail" if age < tail else "warm" if age < tail + warm else "store"
            assert_equal(run.cache.tier_of(position), tier, f"tier of position {position} of {run.appended}")
        for position in subject.integers(-1, run.appended, first - 1):
            with raises("PositionOutOfRange"):
                run.cache.tier_of(position)


@check("TIER-08ab", "tiered")
def stats_count_the_bytes_of_the_stored_tokens(subject: Subject) -> None:
    heads, width = subject.heads, subject.heads * subject.dim
    token_bytes = {"float32": 4 * width, "float16": 2 * width, "bfloat16": 2 * width, "q8": width + 8, "q4": -(-width // 2) + 8}
    token_bytes |= dict.fromkeys(SYMMETRIC_FORMATS, width + 4 * heads)
    assert_equal(new_object(subject, "tiered").stats().compression_ratio, 1.0, "compression_ratio of an empty cache")
    for tail, store in product(
        supported_formats(subject, "tail_dtype", *PLAIN_FORMATS), supported_formats(subject, "store_format", "q4", "q8")
    ):
        run = TieredFixture(subject, tail_dtype=tail, store_format=store, warm_length=2)
        run.cache.append(*run.random_tokens(11))  # 4 in the tail, 2 warm, 5 in the store
        stats, formats = run.cache.stats(), {"tail": tail, "warm": run.config["warm_format"], "store": store}
        want = tuple(2 * run.model.tiers.count(tier) * token_bytes[format] for tier, format in formats.items())
        assert_equal(
            (stats.tail_bytes, stats.warm_bytes, stats.store_bytes),
            want,
            f"bytes in stats of tail, warm tier and store in {formats}",
        )
        ratio = len(run) * 2 * 4 * width / sum(want)
        assert_true(abs(stats.compression_ratio - ratio) < 1e-6, "compression_ratio", str(ratio), stats.compression_ratio)


@check("TIER-08ab", "tiered")
def stats_follow_a_new_policy_and_evictions(subject: Subject) -> None:
    need_support(subject, tail_length=2)
    run = TieredFixture(subject, max_tokens=9)
    run.cache.append(*run.random_tokens(7))
    run.cache.update_policy(tail_length=2)
    run.look("stats")
    run.cache.append(*run.random_tokens(5))
    run.look("stats")


@check("TIER-09", "tiered")
def append_of_incomplete_tokens_raises(subject: Subject) -> None:
    run = TieredFixture(subject)
    run.append(6)
    good = random_tokens(subject, subject.size("tokens", 2))
    fewer = good[:-1]  # does not match `good`, but matches itself
    for bad in (good[:, :, :-1], good[:, :-1], good.reshape(-1)[:-1], good.reshape(-1), fewer):
        for pair in ((bad, good), (good, bad), *([] if bad is fewer else [(bad, bad)])):
            with raises("ShapeMismatch"):
                run.cache.append(*pair)
        run.look()


@check("TIER-11", "tiered")
def attend_computes_each_head_separately(subject: Subject) -> None:
    subject.require_size(num_kv_heads=2)
    heads, dim = subject.heads, subject.dim
    cache = new_object(subject, "tiered", tail_length=20, tail_dtype=tail_dtype(subject))
    keys, values = np.zeros((2, heads, dim), np.float32), np.zeros((2, heads, dim), np.float32)
    keys[0, 0::2, 0] = keys[1, 1::2, 0] = 100  # head 0 attends to token 0, head 1 to token 1
    values[0], values[1] = 1, 2
    cache.append(keys, values)
    query, want = np.zeros((1, heads, dim), np.float32), np.ones((1, heads, dim), np.float32)
    query[..., 0], want[:, 1::2] = 1, 2
    _, bound = expected_attention(subject, query, *cache.read(), scale=1.0)
    assert_within(cache.attend(query, 1.0), want, bound, "attention of heads whose weight is on different tokens")


# ATTN-10: attention uses the dequantized rows that `read` returns.


@check("ATTN-10", "tiered")
def attend_uses_the_values_that_read_returns(subject: Subject) -> None:
    cache = new_object(subject, "tiered", warm_length=2)
    query = random_queries(subject, 3)
    empty = cache.attend(query, default_scale(subject))
    assert_within(empty, np.zeros(query.shape), 0.0, "attention over an empty cache")  # 0 and -0 are equal
    cache.append(*random_pair(subject, 13))
    want, bound = expected_attention(subject, query, *cache.read(), scale=default_scale(subject))
    assert_within(cache.attend(query, default_scale(subject)), want, bound, "attention over tail, warm tier and store")


# LAW-05, LAW-12, LAW-20: laws in the form that applies to this family only.


@check("LAW-12a", "tiered")
def new_with_tiers_longer_than_max_tokens_raises(subject: Subject) -> None:
    most = clamp_to_limits(subject, "tiered")["max_tokens"]
    assert_config_error(subject, "tiered", tail_length=most + 1)
    assert_config_error(subject, "tiered", tail_length=most // 2 + 1, warm_length=most - most // 2)


@check("LAW-20", "tiered")
def new_and_tier_of_accept_every_integer_type(subject: Subject) -> None:
    keys, values = random_pair(subject, 150)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("tiered", max_tokens=120, tail_length=100, migration_batch=64)
        for part in (slice(0, 75), slice(75, 150)):
            yield "append of 75 tokens", typed.call(cache, "append", keys[part], values[part])
        yield "statistics of 150 tokens", dict(cache.stats())
        yield "tiers of positions 29, 49, 50 and 120", [typed.call(cache, "tier_of", position) for position in (29, 49, 50, 120)]
        yield "the last 120 of 150 tokens", typed.call(cache, "read")

    assert_same_for_integer_types(subject, script)


@check("LAW-05ab", "tiered")
def tier_of_an_evicted_or_cleared_token_raises(subject: Subject) -> None:
    cache = new_object(subject, "tiered", max_tokens=6)
    cache.append(*random_pair(subject, cache.config["max_tokens"] + 3))
    for position in (0, 2):
        with raises("PositionOutOfRange"):
            cache.tier_of(position)
    cache.clear()
    assert_equal(
        (cache.total_tokens, len(cache.read()[0])), (0, 0), "total_tokens and the number of tokens that read returned after clear"
    )
    with raises("PositionOutOfRange"):
        cache.tier_of(0)
    cache.append(*random_pair(subject, 1))
    newest = next(tier for tier in ("tail", "warm", "store") if cache.config.get(f"{tier}_length", 1))
    assert_equal(cache.tier_of(0), newest, "tier of the first token after clear")


# LAW-18: production sizes, at which every tier is refilled many times.


@check("LAW-18", "tiered")
def append_migrates_tokens_through_full_tiers(subject: Subject) -> None:
    check_migration_at_production_sizes(subject, 1, 64, (1, 127, 129, 300, 511, 1, 1, 16))


@check("LAW-18", "tiered", real=True)
def append_migrates_tokens_at_the_sizes_of_models(subject: Subject) -> None:
    check_migration_at_production_sizes(subject, 8, 128, (1, 127, 129, 300, 511, 1, 1, 16, 1024, 2048, 1))


def check_migration_at_production_sizes(subject: Subject, heads: int, dim: int, counts: tuple[int, ...]) -> None:
    for store in subject.formats("q4", "q8", "int8", "float8_e4m3fn"):
        cache = new_object(
            subject, "tiered", num_kv_heads=heads, head_dim=dim, max_tokens=513, tail_length=130, warm_length=66,
            store_format=store, migration_batch=64,
        )  # fmt: skip
        config, at = cache.config, 0
        written = WrittenContent(config["num_kv_heads"], config["head_dim"])
        for count in (affordable_tokens(subject, each, len(counts)) for each in counts):
            cache.append(*content_pair(0, 0, range(at, at + count), written.heads, written.dim))
            at += count
        first = max(0, at - config["max_tokens"])
        assert_equal(cache.total_tokens, at - first, f"total_tokens after {at} tokens")
        # Evicted tokens do not affect the others: a token is quantized with its own row only.
        keys, values = content_pair(0, 0, range(first, at), written.heads, written.dim)
        wanted = reads_by_age(keys, config), reads_by_age(values, config)
        written.add_up_to(0, 0, at)
        assert_content(cache.read(), 0, 0, range(first, at), written, subject.level == "exact", wanted)


def append_tagged_content(cache: ObjectProxy, stream: int, positions: range, written: WrittenContent) -> None:
    cache.append(*content_pair(stream, 0, positions, written.heads, written.dim))
    written.add_up_to(stream, 0, positions.stop)


# TIER-12: concurrent calls to a tiered cache.


@check("TIER-12a", "tiered")
def appends_from_threads_lose_no_token(subject: Subject) -> None:
    together = subject.size("tokens", 2)  # tokens per append
    appends = min(25, subject.size("tail_length", 25 * NUM_THREADS * together) // (NUM_THREADS * together))
    each = appends * together
    total = NUM_THREADS * each
    cache = new_object(subject, "tiered", max_tokens=max(1, total), tail_length=total, tail_dtype=tail_dtype(subject))
    if not 0 < total <= cache.config["tail_length"]:
        raise NotOffered(f"a tail of {together} tokens for each of {NUM_THREADS} threads, within its limits")
    shape = (1, subject.heads, subject.dim)

    def work(thread: int, rng: np.random.Generator) -> None:
        for first in range(thread * each, (thread + 1) * each, together):
            rows = np.concatenate([np.full(shape, mark, np.float32) for mark in range(first, first + together)])
            cache.append(rows, -rows)

    run_in_threads(subject, work)
    keys, values = cache.read()
    assert_equal(len(keys), total, f"number of tokens after {NUM_THREADS} threads appended {each} tokens each")
    assert_same(values, -keys, "values of each token, compared with its negated keys")
    marks = keys[:, 0, 0].astype(int).tolist()
    assert_equal(sorted(marks), list(range(total)), "the tokens that threads appended, in ascending order")
    for thread in range(NUM_THREADS):
        own = [mark for mark in marks if mark // each == thread]
        assert_equal(own, sorted(own), f"order of the tokens of thread {thread}")
    for at in range(0, total, together):
        assert_equal(
            marks[at : at + together], list(range(marks[at], marks[at] + together)), f"tokens of one append, at position {at}"
        )


@check("TIER-12b", "tiered")
def read_during_appends_returns_whole_tokens(subject: Subject) -> None:
    cache = new_object(subject, "tiered", max_tokens=200, tail_length=200, tail_dtype=tail_dtype(subject))
    longest, shape = min(3, subject.size("tokens", 3)), (subject.heads, subject.dim)
    appended = list[int]()

    def work(thread: int, rng: np.random.Generator) -> None:
        for i in range(15):
            rows = np.full((int(rng.integers(1, longest + 1)), *shape), 60 * thread + i + 1, np.float32)
            cache.append(rows, -rows)
            appended.append(len(rows))
            keys, values = cache.read()
            assert_same(values, -keys, "values read while other threads append, compared with the negated keys")
            stats = cache.stats()
            parts = stats.tail_tokens + stats.warm_tokens + stats.store_tokens
            assert_equal(
                parts,
                stats.total_tokens,
                "sum of the tiers' tokens in stats while other threads append, compared with total_tokens",
            )

    run_in_threads(subject, work)
    assert_equal(cache.total_tokens, min(sum(appended), cache.config["max_tokens"]), "total_tokens after all threads ended")


@check("TIER-12c", "tiered")
def reads_from_threads_return_what_they_return_alone(subject: Subject) -> None:
    """Each thread reads, and attends with queries of its own, while each tier contains tokens."""
    cache = new_object(subject, "tiered", max_tokens=60, tail_length=9, warm_length=11)
    for count in (21, 17):
        cache.append(*random_pair(subject, subject.size("tokens", count), subject.heads, subject.dim))

    def attend(query: NDArray) -> list[NDArray]:
        with suppress(NotOffered):
            return [cache.attend(query, 0.5)]
        return []

    query_heads, calls = subject.heads * subject.size("group_size", 2), list[list[Calls]]()
    for _ in range(NUM_THREADS):
        query = random_tokens(subject, 2, heads=query_heads)
        calls.append([cache.read, partial(attend, query)])
    assert_threads_do_not_interfere(subject, calls, "read and attend")


# TIER-13 and FMT-AFF-03: values that no tier can store, and separate scales for keys and values.


@check("TIER-13a", "tiered")
def append_of_a_value_that_the_tail_cannot_store_raises(subject: Subject) -> None:
    run = TieredFixture(subject, tail_dtype="float16")
    require_sizes(run.cache, tail_length=1)
    run.append(6)
    for bad in (65520.0, -1e30, np.nan, np.inf):
        for part in (0, 1):
            pair = random_pair(subject, subject.size("tokens", 2))
            pair[part][-1, -1, -1] = bad
            with raises("NonFinite"):
                run.cache.append(*pair)
            run.look()
    largest = np.full((1, subject.heads, subject.dim), 65504.0, np.float32)
    run.cache.append(largest, largest)
    run.look()


@check("TIER-13b", "tiered")
def append_of_a_token_whose_range_overflows_raises(subject: Subject) -> None:
    wide = np.zeros((1, subject.heads, subject.dim), np.float32)
    wide[0, 0, 0], wide[0, -1, -1] = 3e38, -3e38  # each is finite, their difference is not
    for tail in (4, 0):
        run = TieredFixture(subject, tail_dtype=tail_dtype(subject, "float32", "bfloat16"), tail_length=tail)
        require_sizes(run.cache, max_tokens=7)
        run.append(6)
        with raises("NonFinite"):
            run.cache.append(wide, wide)
        run.look()
        large = np.full_like(wide, 8e37)
        large[0, 0, 0] *= -1
        if can_store(large, [run.config["store_format"]]):  # TIER-18 judges formats with scales of 16 bits
            run.cache.append(large, large / 2)
            run.look("total_tokens")


@check("TIER-13b", "tiered")
def append_computes_the_range_after_rounding_to_the_tail_dtype(subject: Subject) -> None:
    """A bfloat16 tail rounds up: the range of the given token is finite, but the range of the rounded token is not."""
    wide = np.full((1, subject.heads, subject.dim), 2.0**127 * (1 - 2.0**-10), np.float32)
    wide[0, 0, 0] *= -1
    run = TieredFixture(subject, tail_dtype="bfloat16", tail_length=1)
    run.append(3)
    with raises("NonFinite"):
        run.cache.append(wide, wide)
    run.append(3)


@check("TIER-13c", "tiered")
def append_succeeds_after_large_tokens_were_accepted(subject: Subject) -> None:
    """Tokens migrate through a warm tier, whose dequantized values may be larger than the appended values."""
    for magnitude in np.array([2.0**125, 2.0**126, 2.0**127 * (1 - 2.0**-24), 3.4028235e38], np.float32):
        for warm in supported_formats(subject, "warm_format", "q8", "int8"):
            sizes = {"tail_dtype": tail_dtype(subject, "float32", "bfloat16"), "tail_length": 1, "warm_length": 1}
            cache = new_object(
                subject,
                "tiered",
                **sizes,
                warm_format=warm,
                store_format=supported_formats(subject, "store_format", "q4", "q8")[0],
            )
            require_sizes(cache, max_tokens=5)
            token = np.full((1, subject.heads, subject.dim), magnitude, np.float32)
            for sign in (1, -1):
                token[0, -1, 0] = sign * magnitude
                with may_raise("NonFinite"):
                    cache.append(token, token)
            before = cache.total_tokens
            cache.append(*random_pair(subject, 3))
            assert_equal(
                cache.total_tokens,
                before + 3,
                f"total_tokens after an append of 3 tokens to a cache with tokens of magnitude {magnitude}",
            )


@check("FMT-AFF-03", "tiered")
def append_quantizes_keys_and_values_with_separate_scales(subject: Subject) -> None:
    for name in supported_formats(subject, "store_format", *AFFINE_FORMATS):
        stream = TieredLawAdapter(subject, tail_length=0, store_format=name)
        keys, values = random_pair(subject, 4 + stream.config["tail_length"])
        keys, values = round_to_input_dtype(subject, keys / 100), round_to_input_dtype(subject, values * 100)
        stream.append(keys, values)
        assert_reads(subject, stream.read(), stream.expected(keys, values), f"{name} tokens with small keys and large values")


# EDIT-06: truncation, which is required if the removed tokens caused no migration or eviction.


@check("EDIT-06b", "tiered")
def truncate_after_a_migration_restores_the_tokens_or_raises(subject: Subject) -> None:
    for tail, warm, most in ((4, 0, 20), (3, 2, 20), (0, 3, 20), (4, 0, 7), (6, 0, 6)):
        for fewer in (1, 3, 8):
            run = TieredFixture(subject, tail_length=tail, warm_length=warm, max_tokens=most)
            first = run.appended
            run.append(9)
            with may_raise("NotTruncatable"):
                run.cache.truncate(max(first, run.appended - fewer))
            run.look()
            run.append(2)


@check("EDIT-06b", "tiered")
def truncate_after_update_policy_moved_tokens_restores_them_or_raises(subject: Subject) -> None:
    """No append has moved a token, so that only the shorter tail or warm tier does."""
    tried = 0
    for tail, warm, policy in ((4, 0, {"tail_length": 1}), (3, 2, {"tail_length": 0}), (0, 3, {"warm_length": 1})):
        for fewer in (1, 3):
            run = TieredFixture(subject, tail_length=tail, warm_length=warm)
            if len(run) or run.room_left < 3 or not all(supports(subject, *each) for each in policy.items()):
                continue
            tried += 1
            run.append(run.room_left)
            run.cache.update_policy(**policy)
            with may_raise("NotTruncatable"):
                run.cache.truncate(run.appended - fewer)
            run.look()
            run.append(2)
    if not tried:
        raise NotOffered("a tail or warm tier that becomes shorter")


@check("EDIT-06a", "tiered")
def truncate_removes_tokens_that_caused_no_migration(subject: Subject) -> None:
    """Older tokens are in the store, but the removed tokens were appended to a tail that had room for them."""
    run = TieredFixture(subject, tail_length=2)
    run.append(5)
    longer = run.config["tail_length"] + 4
    need_support(subject, tail_length=longer)
    require_sizes(run.cache, max_tokens=max(longer + run.config["warm_length"], len(run) + 2))
    run.cache.update_policy(tail_length=longer)
    before, total = run.cache.read(), len(run)
    run.append(2)
    for length in (run.appended - 1, run.appended - 2):
        run.cache.truncate(length)
        run.look()
    assert_pair([part[:total] for part in run.cache.read()], before, "tokens after truncate removed all tokens appended since")
    run.append(7)


@check("EDIT-06a", "tiered")
def truncate_of_an_empty_cache_to_0_succeeds(subject: Subject) -> None:
    cache = new_object(subject, "tiered")
    keys, values = random_pair(subject, 1)
    for count in (0, 1):
        cache.append(keys[:count], values[:count])
        cache.truncate(0)
        assert_equal(cache.total_tokens, 0, f"total_tokens after truncate(0) of {count} tokens")
        assert_same(cache.read()[0], keys[:0], f"keys that read returned after truncate(0) of {count} tokens")


# MOVE-01: `load` restores every token in its tier and format.


def copy_by_load(run: TieredFixture) -> TieredFixture:
    copy = TieredFixture(run.subject, **run.config)
    copy.cache.load(run.cache.save())
    copy.look()
    with suppress(NotOffered):
        copy.look("stats")
    return copy


def check_copies(run: TieredFixture) -> None:
    """Checks that copies by `save` and `load` have the tokens of a cache, also after later appends and truncations."""
    copy = copy_by_load(run)
    for count in (1, 4):
        assert_pair(copy.cache.read(), run.cache.read(), "tokens of a loaded cache, compared with the saved cache")
        if first := run.appended - len(run):
            with raises("PositionOutOfRange"):
                copy.cache.tier_of(first - 1)
        copy.append_parts(*run.append(count), count)
        copy = copy_by_load(run)
    for length in (run.appended - 2, run.appended):  # removes tokens whose append migrated others, then none
        with suppress(NotOffered):
            results = [truncate_result(cache, length) for cache in (copy.cache, run.cache)]
            assert_equal(results[0], results[1], f"result of truncate({length}) on a loaded cache, compared with the saved cache")
    copy.look()


def truncate_result(cache: ObjectProxy, length: int) -> str:
    """Returns "truncated", or the kind of the error that `truncate` raises."""
    try:
        cache.truncate(length)
    except (NotOffered, ClauseViolation):
        raise
    except Exception as error:
        return to_call_error(error).kind
    return "truncated"


@check("MOVE-01ac", "tiered")
def load_restores_tiers_and_positions(subject: Subject) -> None:
    for warm in dict.fromkeys(subject.size("warm_length", wanted) for wanted in (0, 3)):
        for evicted in (False, True):
            run = TieredFixture(subject, warm_length=warm)
            run.append(run.config["max_tokens"] + 3 if evicted else 7)
            check_copies(run)


@check("MOVE-01bc", "tiered")
def load_restores_tokens_in_the_formats_in_which_they_are_stored(subject: Subject) -> None:
    run = TieredFixture(subject, warm_length=0)
    original = run.config["store_format"]
    other = next((name for name in ("q8", "q4", "int8") if name != original and supports(subject, "store_format", name)), None)
    if not other:
        raise NotOffered("a second store format")
    run.append(run.config["tail_length"] + 3)
    for name in (other, original):
        run.cache.update_policy(store_format=name)
        run.append(2)
    check_copies(run)


@check("EDIT-03", "tiered")
def truncate_after_a_policy_change_keeps_the_policy(subject: Subject) -> None:
    fixture = TieredFixture(subject, tail_length=9, warm_length=2)
    first = fixture.appended
    fixture.append(3)
    shorter = {name: fixture.config[name] - 1 for name in ("tail_length", "warm_length") if fixture.config[name]}
    need_support(subject, **shorter)
    fixture.cache.update_policy(**shorter)
    if fixture.model.tiers.moved_at > first or fixture.room_left < 2:
        raise NotOffered("a shorter tail with room for the stored tokens and 2 more")
    fixture.append(2, factor=2.0**8)
    fixture.cache.truncate(first + 3)
    fixture.append(5, 1, 2, 6)
    fixture.look()


@check("EDIT-02ab", "tiered")
def truncate_past_the_end_raises_after_evictions(subject: Subject) -> None:
    fixture = TieredFixture(subject, max_tokens=7)
    for count in (3, 6, 4):  # no token has migrated, then some have, then some are evicted
        fixture.append(count)
        end = fixture.appended
        for length in subject.integers(end + 1, end + 20, -1, -end, -end - 1):
            with raises("PositionOutOfRange"):
                fixture.cache.truncate(length)
            fixture.look()
        fixture.cache.truncate(end)
        fixture.look()


@check("EDIT-03", "tiered")
def truncated_tokens_cause_no_migration_and_no_eviction(subject: Subject) -> None:
    for policy in ({"tail_length": 9, "warm_length": 2}, {"tail_length": 0, "warm_length": 9}, {"tail_length": 0}):
        fixture = TieredFixture(subject, **policy)
        if fixture.room_left < 9:
            raise NotOffered("room for 9 tokens before one migrates")
        first = fixture.appended
        for length, more in ((first, 3), (first + 2, 2), (first + 5, 1)):  # the last truncate keeps one of the two draft tokens
            fixture.append(2, factor=2.0**8)
            fixture.cache.truncate(length)
            fixture.look()
            fixture.append(more)
        fixture.append(4, 1, 6, 9)
