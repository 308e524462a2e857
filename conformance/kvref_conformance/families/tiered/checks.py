"""TIER: the tier of each token, and its dequantized rows."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.families.tiered.law_adapter import TieredLawAdapter
from kvref_conformance.families.tiered.tier_model import POLICY, TierModel, can_go, settled
from kvref_conformance.oracle.formats import AFFINE, PLAIN, SYMMETRIC
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    queries,
    raises,
    reads,
    shaped,
    true,
)
from kvref_conformance.testlib.fixtures import (
    at_least,
    clamp_to_limits,
    construct,
    formats_of,
    new,
    pair_of_tokens,
    random_tokens,
    refused,
    round_to_input_dtype,
    supports,
)
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.production_sizes import affordable, edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, belongs, pair_of_content
from kvref_conformance.testlib.thread_stress import THREADS, in_threads


def both(subject: Subject, **changes: Any) -> tuple[ObjectProxy, TierModel]:
    """A cache and the oracle's list of tokens, with the same policy.

    If the tiers are longer than the check requests, tokens are appended to both until exactly the requested room is left.
    """
    asked = all_families()["tiered"].small | changes
    config = clamp_to_limits(subject, "tiered", **changes)
    longer = max(0, sum(config[name] - asked[name] for name in ("tail_length", "warm_length")))
    config = clamp_to_limits(subject, "tiered", **changes | {"max_tokens": asked["max_tokens"] + longer})
    cache, tiers = construct(subject, "tiered", **config), TierModel(**{name: config[name] for name in POLICY})
    if longer:
        append(subject, cache, tiers, longer)
    return cache, tiers


def change(cache: ObjectProxy, tiers: TierModel, **policy: Any) -> None:
    cache.update_policy(**policy)
    tiers.update_policy(**policy)


def allowed(subject: Subject, **policy: Any) -> None:
    """Raises NotOffered if the limits exclude one of these values. The check has no use for other values."""
    for name, value in policy.items():
        if not supports(subject, name, value):
            raise NotOffered(f"{name} {value}, where its limits say {subject.limits.of('tiered', name)}")


def tail_of(subject: Subject, *wanted: str) -> str:
    """The first supported tail dtype of `wanted`, or of all plain dtypes if none is given."""
    return formats_of(subject, "tail_dtype", *(wanted or PLAIN))[0]


def two_stores(subject: Subject) -> tuple[str, str]:
    """Two store formats: q4 and q8, or the supported one twice if only one is supported."""
    first, *_, last = formats_of(subject, "store_format", "q4", "q8") * 2
    return first, last


def append(subject: Subject, cache: ObjectProxy, tiers: TierModel, count: int) -> None:
    keys, values = pair_of_tokens(subject, count, cache.config["num_kv_heads"], cache.config["head_dim"])
    cache.append(keys, values)
    tiers.append(keys, values)


def agree(subject: Subject, cache: ObjectProxy, tiers: TierModel, when: str) -> None:
    stats = cache.stats()
    got = (stats.total_tokens, stats.tail_tokens, stats.warm_tokens, stats.store_tokens)
    want = (len(tiers.tokens), tiers.count("tail"), tiers.count("warm"), tiers.count("store"))
    assert_equal(got, want, f"number of tokens in total, in the tail, the warm tier and the store, {when}")
    if tiers.tokens:
        reads(subject, cache.read(), tiers.read(), f"the tokens of the cache, {when}")


@check("TIER-01", "tiered")
def the_newest_tokens_are_in_the_tail(subject: Subject) -> None:
    for dtype in formats_of(subject, "tail_dtype", "float16", "bfloat16", "float32"):
        cache, tiers = both(subject, tail_dtype=dtype)
        for step, count in enumerate((1, 2, 1, 1, 6, 1)):
            append(subject, cache, tiers, count)
            agree(subject, cache, tiers, f"with a {dtype} tail, after append {step + 1}")


@check("TIER-02", "tiered")
def tokens_are_quantized_once_from_what_the_tail_held(subject: Subject) -> None:
    for name in formats_of(subject, "store_format", "q8", "q4"):
        cache, tiers = both(subject, store_format=name)
        at_least(cache, max_tokens=10)  # so that some of the tokens stored first remain
        append(subject, cache, tiers, 6)
        before, stored = cache.read(), tiers.count("store")
        for _ in range(5):
            append(subject, cache, tiers, 1)
        agree(subject, cache, tiers, f"with a {name} store, decoded one token at a time")
        gone = tiers.tokens[0].position  # number of evicted tokens
        keys, values = (part[: stored - gone] for part in cache.read())
        assert_pair(
            (keys, values),
            (before[0][gone:stored], before[1][gone:stored]),
            "tokens in the store, read again after more tokens were appended",
        )


@check("TIER-03", "tiered")
def reading_is_oldest_first(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=9)
    for count in (3, 1, 1, 4, 1, 7, 1, 1, 1):  # wraps around every buffer of 4 and 9
        append(subject, cache, tiers, count)
        agree(subject, cache, tiers, f"after {tiers.appended} tokens")


@check("TIER-04", "tiered")
def the_batch_changes_nothing_that_is_read(subject: Subject) -> None:
    given = [pair_of_tokens(subject, count) for count in (7, 1, 1, 9, 1)]
    for batch in (1, 2, 3, 64):
        cache, tiers = both(subject, migration_batch=batch)
        for keys, values in given:
            cache.append(keys, values)
            tiers.append(keys, values)
            agree(subject, cache, tiers, f"with migration_batch {batch}, after {tiers.appended} tokens")


@check("TIER-05a", "tiered")
def the_oldest_tokens_are_evicted(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=7)
    most = cache.config["max_tokens"]
    for count in (most - 1, 1, 1, 3, most, 2):
        append(subject, cache, tiers, count)
        true(cache.total_tokens <= most, "number of stored tokens", f"at most {most}", cache.total_tokens)
        agree(subject, cache, tiers, f"with max_tokens {most}, after {tiers.appended} tokens")


@check("TIER-05b", "tiered")
def an_append_longer_than_the_cache_keeps_its_end(subject: Subject) -> None:
    for times, more in ((1, 0), (1, 1), (2, 1), (4, 2)):
        cache, tiers = both(subject, max_tokens=7)
        most = cache.config["max_tokens"]
        append(subject, cache, tiers, 2)
        append(subject, cache, tiers, times * most + more)
        agree(subject, cache, tiers, f"with max_tokens {most}, after an append of {times * most + more} tokens")


@check("TIER-06", "tiered")
def the_total_is_the_sum_of_the_tiers(subject: Subject) -> None:
    for tail in (0, 2, 6):  # with tail_length 6 = max_tokens, tokens are evicted from the tail
        cache = new(subject, "tiered", max_tokens=6, tail_length=tail)
        most = cache.config["max_tokens"]
        for appended in range(1, 2 * most):
            cache.append(*pair_of_tokens(subject, 1))
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
def positions_are_absolute(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=9, tail_length=2, warm_length=3)
    for count in (4, 3, 1, 6):
        append(subject, cache, tiers, count)
        for token in tiers.tokens:
            assert_equal(
                cache.tier_of(token.position), token.tier, f"tier of position {token.position} after {tiers.appended} tokens"
            )
        for position in subject.integers(-1, tiers.appended, tiers.tokens[0].position - 1):
            with raises("PositionOutOfRange"):
                cache.tier_of(position)


@check("TIER-08ab", "tiered")
def statistics_count_the_bytes_stored(subject: Subject) -> None:
    heads, width = subject.heads, subject.heads * subject.dim
    token_bytes = {"float32": 4 * width, "float16": 2 * width, "bfloat16": 2 * width, "q8": width + 8, "q4": -(-width // 2) + 8}
    token_bytes |= dict.fromkeys(SYMMETRIC, width + 4 * heads)
    assert_equal(new(subject, "tiered").stats().compression_ratio, 1.0, "compression_ratio of an empty cache")
    for tail, store in product(formats_of(subject, "tail_dtype", *PLAIN), formats_of(subject, "store_format", "q4", "q8")):
        cache, tiers = both(subject, tail_dtype=tail, store_format=store, warm_length=2)
        append(subject, cache, tiers, 11)  # 4 in the tail, 2 warm, 5 in the store
        stats, formats = cache.stats(), {"tail": tail, "warm": cache.config["warm_format"], "store": store}
        want = tuple(2 * tiers.count(tier) * token_bytes[format] for tier, format in formats.items())
        assert_equal(
            (stats.tail_bytes, stats.warm_bytes, stats.store_bytes),
            want,
            f"bytes in stats of tail, warm tier and store in {formats}",
        )
        ratio = len(tiers.tokens) * 2 * 4 * width / sum(want)
        true(abs(stats.compression_ratio - ratio) < 1e-6, "compression_ratio", str(ratio), stats.compression_ratio)


@check("TIER-09", "tiered")
def keys_of_no_whole_token_are_refused(subject: Subject) -> None:
    cache, tiers = both(subject)
    append(subject, cache, tiers, 6)
    good = random_tokens(subject, subject.size("tokens", 2))
    fewer = good[:-1]  # does not match `good`, but matches itself
    for bad in (good[:, :, :-1], good[:, :-1], good.reshape(-1)[:-1], good.reshape(-1), fewer):
        for pair_given in ((bad, good), (good, bad), *([] if bad is fewer else [(bad, bad)])):
            with raises("ShapeMismatch"):
                cache.append(*pair_given)
        agree(subject, cache, tiers, f"after keys or values of shape {list(bad.shape)} raised ShapeMismatch")


@check("TIER-11", "tiered")
def each_head_attends_by_itself(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    heads, dim = subject.heads, subject.dim
    cache = new(subject, "tiered", tail_length=20, tail_dtype=tail_of(subject))
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
def attention_over_tiers_is_over_what_they_read_as(subject: Subject) -> None:
    cache = new(subject, "tiered", warm_length=2)
    query = queries(subject, 1)
    empty = cache.attend(query, default_scale(subject))
    assert_within(empty, np.zeros(query.shape), 0.0, "attention over an empty cache")  # 0 and -0 are equal
    cache.append(*pair_of_tokens(subject, 13))
    want, bound = expected_attention(subject, query, *cache.read(), scale=default_scale(subject))
    got = shaped(
        cache.attend(query, default_scale(subject)),
        query.shape,
        "attention over tail, warm tier and store, compared with attention over the values that read returns",
    )
    assert_within(
        got, want, bound, "attention over tail, warm tier and store, compared with attention over the values that read returns"
    )


# LAW-05, LAW-12, LAW-20: laws in the form that applies to this family only.


@check("LAW-12a", "tiered")
def tiers_must_fit_the_cache(subject: Subject) -> None:
    most = clamp_to_limits(subject, "tiered")["max_tokens"]
    refused(subject, "tiered", tail_length=most + 1)
    refused(subject, "tiered", tail_length=most // 2 + 1, warm_length=most - most // 2)


@check("LAW-20", "tiered")
def tiers_are_as_long_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 150)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("tiered", max_tokens=120, tail_length=100, migration_batch=64)
        for part in (slice(0, 75), slice(75, 150)):
            yield "append of 75 tokens", typed.call(cache, "append", keys[part], values[part])
        yield "statistics of 150 tokens", dict(cache.stats())
        yield "tiers of positions 29, 49, 50 and 120", [typed.call(cache, "tier_of", position) for position in (29, 49, 50, 120)]
        yield "the last 120 of 150 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


@check("LAW-05ab", "tiered")
def a_token_forgotten_is_nowhere(subject: Subject) -> None:
    cache = new(subject, "tiered", max_tokens=6)
    cache.append(*pair_of_tokens(subject, cache.config["max_tokens"] + 3))
    for position in (0, 2):
        with raises("PositionOutOfRange"):
            cache.tier_of(position)
    cache.clear()
    assert_equal(
        (cache.total_tokens, len(cache.read()[0])), (0, 0), "total_tokens and the number of tokens that read returned after clear"
    )
    with raises("PositionOutOfRange"):
        cache.tier_of(0)
    cache.append(*pair_of_tokens(subject, 1))
    newest = next(tier for tier in ("tail", "warm", "store") if cache.config.get(f"{tier}_length", 1))
    assert_equal(cache.tier_of(0), newest, "tier of the first token after clear")


@check("LAW-20", "tiered")
def tokens_go_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 110)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("tiered", max_tokens=400, tail_length=200, migration_batch=64)
        cache.append(keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(keys[:60], values[:60])
            yield f"total_tokens after an append of 60, call {time + 1}", cache.total_tokens
        yield "tier of position 159", typed.call(cache, "tier_of", 159)
        yield "160 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


# LAW-18: production sizes, at which every tier is refilled many times.


@check("LAW-18", "tiered")
def tokens_age_through_tiers_that_are_full(subject: Subject) -> None:
    turning_over(subject, 1, 64, (1, 127, 129, 300, 511, 1, 1, 16))


@check("LAW-18", "tiered", real=True)
def tokens_age_through_tiers_as_models_have_them(subject: Subject) -> None:
    turning_over(subject, 8, 128, (1, 127, 129, 300, 511, 1, 1, 16, 1024, 2048, 1))


def turning_over(subject: Subject, heads: int, dim: int, pieces: tuple[int, ...]) -> None:
    for store in subject.formats("q4", "q8", "int8", "float8_e4m3fn"):
        cache = new(
            subject, "tiered", num_kv_heads=heads, head_dim=dim, max_tokens=513, tail_length=130, warm_length=66,
            store_format=store, migration_batch=64,
        )  # fmt: skip
        config, at = cache.config, 0
        written = WrittenContent(config["num_kv_heads"], config["head_dim"])
        policy = {name: config[name] for name in POLICY}
        for count in (affordable(subject, each, len(pieces)) for each in pieces):
            cache.append(*pair_of_content(0, 0, range(at, at + count), written.heads, written.dim))
            at += count
        first = max(0, at - config["max_tokens"])
        assert_equal(cache.total_tokens, at - first, f"total_tokens after {at} tokens")
        # Evicted tokens do not affect the others: a token is quantized with its own row only.
        given = pair_of_content(0, 0, range(first, at), written.heads, written.dim)
        wanted: tuple[ExpectedReads, ExpectedReads] = (settled(given[0], policy), settled(given[1], policy))
        written.up_to(0, 0, at)
        belongs(cache.read(), 0, 0, range(first, at), written, subject.level == "exact", wanted)


@check("LAW-18", "tiered")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    for store in subject.formats("q4", "q8", "int8", "float8_e4m3fn"):
        cache = new(
            subject, "tiered", num_kv_heads=1, head_dim=64, max_tokens=900, tail_length=530, warm_length=66,
            store_format=store, migration_batch=64,
        )  # fmt: skip
        config, at = cache.config, 0
        written = WrittenContent(config["num_kv_heads"], config["head_dim"])
        policy = {name: config[name] for name in POLICY}
        newest = next(config[name] for name in ("tail_length", "warm_length", "max_tokens") if config[name])
        ends = edges(affordable(subject, newest, 2) - 5)
        for end in (*ends, *reversed(ends), *(end + newest for end in ends[-1:])):  # the last length makes tokens migrate
            if end > at:
                append_tagged_content(cache, 0, range(at, end), written)
            if end in ends:
                append_tagged_content(cache, 1, range(max(at, end), max(at, end) + 5), written)
                cache.truncate(end)
            first = max(0, end - config["max_tokens"])
            given = pair_of_content(0, 0, range(first, end), written.heads, written.dim)
            wanted: tuple[ExpectedReads, ExpectedReads] = (settled(given[0], policy), settled(given[1], policy))
            belongs(cache.read(), 0, 0, range(first, end), written, subject.level == "exact", wanted)
            at = end


def append_tagged_content(cache: ObjectProxy, stream: int, positions: range, written: WrittenContent) -> None:
    cache.append(*pair_of_content(stream, 0, positions, written.heads, written.dim))
    written.up_to(stream, 0, positions.stop)


# TIER-12: concurrent calls to a tiered cache.


@check("TIER-12a", "tiered")
def appends_from_threads_lose_and_tear_nothing(subject: Subject) -> None:
    together = subject.size("tokens", 2)  # tokens per append
    appends = min(25, subject.size("tail_length", 25 * THREADS * together) // (THREADS * together))
    each = appends * together
    total = THREADS * each
    cache = new(subject, "tiered", max_tokens=max(1, total), tail_length=total, tail_dtype=tail_of(subject))
    if not 0 < total <= cache.config["tail_length"]:
        raise NotOffered(f"a tail of {together} tokens for each of {THREADS} threads, within its limits")
    shape = (1, subject.heads, subject.dim)

    def work(thread: int, rng: np.random.Generator) -> None:
        for first in range(thread * each, (thread + 1) * each, together):
            rows = np.concatenate([np.full(shape, mark, np.float32) for mark in range(first, first + together)])
            cache.append(rows, -rows)

    in_threads(subject, work)
    keys, values = cache.read()
    assert_equal(len(keys), total, f"number of tokens after {THREADS} threads appended {each} tokens each")
    assert_same(values, -keys, "values of each token, compared with its negated keys")
    marks = keys[:, 0, 0].astype(int).tolist()
    assert_equal(sorted(marks), list(range(total)), "the tokens that threads appended, in ascending order")
    for thread in range(THREADS):
        own = [mark for mark in marks if mark // each == thread]
        assert_equal(own, sorted(own), f"order of the tokens of thread {thread}")
    for at in range(0, total, together):
        assert_equal(
            marks[at : at + together], list(range(marks[at], marks[at] + together)), f"tokens of one append, at position {at}"
        )


@check("TIER-12b", "tiered")
def readers_beside_writers_see_whole_tokens(subject: Subject) -> None:
    cache = new(subject, "tiered", max_tokens=200, tail_length=200, tail_dtype=tail_of(subject))
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

    in_threads(subject, work)
    assert_equal(cache.total_tokens, min(sum(appended), cache.config["max_tokens"]), "total_tokens after all threads ended")


# TIER-13 and FMT-AFF-03: values that no tier can store, and separate scales for keys and values.


@check("TIER-13a", "tiered")
def a_value_the_tail_cannot_hold_is_refused_at_append(subject: Subject) -> None:
    cache, tiers = both(subject, tail_dtype="float16")
    at_least(cache, tail_length=1)
    append(subject, cache, tiers, 6)
    for bad in (65520.0, -1e30, np.nan, np.inf):
        for which in (0, 1):
            rows = pair_of_tokens(subject, subject.size("tokens", 2))
            rows[which][-1, -1, -1] = bad
            with raises("NonFinite"):
                cache.append(*rows)
            agree(subject, cache, tiers, f"after a token with {bad} raised NonFinite")
    edge = np.full((1, subject.heads, subject.dim), 65504.0, np.float32)
    cache.append(edge, edge)
    tiers.append(edge, edge)
    agree(subject, cache, tiers, "after append of the largest float16 number")


@check("TIER-13b", "tiered")
def a_token_no_store_can_hold_is_refused_at_append(subject: Subject) -> None:
    wide = np.zeros((1, subject.heads, subject.dim), np.float32)
    wide[0, 0, 0], wide[0, -1, -1] = 3e38, -3e38  # each is finite, their difference is not
    for tail in (4, 0):
        cache, tiers = both(subject, tail_dtype=tail_of(subject, "float32", "bfloat16"), tail_length=tail)
        at_least(cache, max_tokens=7)
        append(subject, cache, tiers, 6)
        with raises("NonFinite"):
            cache.append(wide, wide)
        agree(subject, cache, tiers, "after a token whose range overflows float32 raised NonFinite")
        large = np.full_like(wide, 8e37)
        large[0, 0, 0] *= -1
        if can_go(large, [tiers.policy["store_format"]]) is not True:
            continue  # scales of 16 bits, which TIER-18 judges
        cache.append(large, large / 2)
        assert_equal(
            cache.total_tokens,
            len(tiers.tokens) + 1,
            "total_tokens after append of a large token whose range does not overflow float32",
        )


@check("TIER-13b", "tiered")
def a_token_is_looked_at_as_the_tail_holds_it(subject: Subject) -> None:
    """A bfloat16 tail rounds up: the range of the given token is finite, but the range of the rounded token is not."""
    wide = np.full((1, subject.heads, subject.dim), 2.0**127 * (1 - 2.0**-10), np.float32)
    wide[0, 0, 0] *= -1
    cache, tiers = both(subject, tail_dtype="bfloat16", tail_length=1)
    append(subject, cache, tiers, 3)
    with raises("NonFinite"):
        cache.append(wide, wide)
    append(subject, cache, tiers, 3)
    agree(subject, cache, tiers, "after a token whose range overflows after rounding to the tail's dtype raised NonFinite")


@check("TIER-13c", "tiered")
def what_was_taken_can_move_on(subject: Subject) -> None:
    """Tokens migrate through a warm tier, whose dequantized values may be larger than the appended values."""
    for magnitude in np.array([2.0**125, 2.0**126, 2.0**127 * (1 - 2.0**-24), 3.4028235e38], np.float32):
        for warm in formats_of(subject, "warm_format", "q8", "int8"):
            sizes = {"tail_dtype": tail_of(subject, "float32", "bfloat16"), "tail_length": 1, "warm_length": 1}
            cache = new(subject, "tiered", **sizes, warm_format=warm, store_format=two_stores(subject)[0])
            at_least(cache, max_tokens=5)
            token = np.full((1, subject.heads, subject.dim), magnitude, np.float32)
            for sign in (1, -1):
                token[0, -1, 0] = sign * magnitude
                with may_raise("NonFinite"):
                    cache.append(token, token)
            before = cache.total_tokens
            cache.append(*pair_of_tokens(subject, 3))
            assert_equal(
                cache.total_tokens,
                before + 3,
                f"total_tokens after an append of 3 tokens to a cache with tokens of magnitude {magnitude}",
            )


@check("FMT-AFF-03", "tiered")
def keys_and_values_have_scales_of_their_own(subject: Subject) -> None:
    for name in formats_of(subject, "store_format", *AFFINE):
        stream = TieredLawAdapter(subject, tail_length=0, store_format=name)
        keys, values = pair_of_tokens(subject, 4 + stream.config["tail_length"])
        keys, values = round_to_input_dtype(subject, keys / 100), round_to_input_dtype(subject, values * 100)
        stream.append(keys, values)
        reads(subject, stream.read(), stream.expected(keys, values), f"{name} tokens with small keys and large values")
