"""TIER: policies and their changes, threads, and values no tier can hold."""

from typing import Any

import numpy as np

from kvref_conformance.checking.expect import equal, may_raise, pair, raises, reads, same, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import DIM, HEADS, new, pair_of_tokens, tokens
from kvref_conformance.checking.threads import THREADS, in_threads
from kvref_conformance.checks.tiered import agree, append, both
from kvref_conformance.drivers.guard import data_bytes
from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.oracle.rows import read_as
from kvref_conformance.oracle.tiers import given, stacked, through
from kvref_conformance.outcome import NotOffered


@check("TIER-10", "tiered")
def a_shorter_tail_migrates_at_once(subject: Subject) -> None:
    for start, then in ((6, 2), (6, 0), (4, 1)):
        cache, tiers = both(subject, tail_length=start)
        append(subject, cache, tiers, 9)
        cache.update_policy(tail_length=then)
        tiers.update_policy(tail_length=then)
        agree(subject, cache, tiers, f"after the tail went from {start} to {then}")
        append(subject, cache, tiers, 3)
        agree(subject, cache, tiers, f"3 tokens after the tail went from {start} to {then}")


@check("TIER-10", "tiered")
def a_longer_tail_fills_with_new_tokens(subject: Subject) -> None:
    cache, tiers = both(subject, tail_length=2)
    append(subject, cache, tiers, 5)
    for part in (cache, tiers):
        part.update_policy(tail_length=5)
    agree(subject, cache, tiers, "after the tail was lengthened")
    for _ in range(5):
        append(subject, cache, tiers, 1)
        agree(subject, cache, tiers, f"after the tail was lengthened and {tiers.appended - 5} tokens more")


@check("TIER-10", "tiered")
def a_new_format_is_for_tokens_that_migrate_later(subject: Subject) -> None:
    cache, tiers = both(subject, store_format="q4")
    append(subject, cache, tiers, 7)
    for part in (cache, tiers):
        part.update_policy(store_format="q8")
    agree(subject, cache, tiers, "after the store's format changed")
    append(subject, cache, tiers, 3)
    agree(subject, cache, tiers, "3 tokens after the store's format changed")
    for part in (cache, tiers):
        part.update_policy(tail_dtype="float32", warm_length=2)
    append(subject, cache, tiers, 6)
    agree(subject, cache, tiers, "6 tokens after the tail's dtype and the warm tier changed")


@check("TIER-10", "tiered")
def tokens_of_several_formats_age_alike(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=9, store_format="q4")
    for store, tail, count in (("q8", "float32", 7), ("q4", "float16", 2), ("q8", "float16", 1), ("q4", "float32", 5)):
        append(subject, cache, tiers, count)
        for part in (cache, tiers):
            part.update_policy(store_format=store, tail_dtype=tail)
        agree(subject, cache, tiers, f"after the store became {store} and the tail {tail}")
    for count in (6, 1, 8):  # evictions and migrations that take tokens of several formats at once
        append(subject, cache, tiers, count)
        agree(subject, cache, tiers, f"of several formats, {count} tokens later")


@check("TIER-10", "tiered")
def a_policy_that_makes_no_sense_changes_nothing(subject: Subject) -> None:
    cache, tiers = both(subject)
    append(subject, cache, tiers, 7)
    wrong: list[dict[str, Any]] = [
        {"tail_length": 21}, {"tail_length": -1}, {"store_format": "q5"}, {"max_tokens": 3}, {"nonsense": 1},
        {"tail_length": 1, "store_format": "q5"}, {"warm_length": 3, "tail_length": 18}, {"tail_length": 2, "nonsense": 1},
    ]  # fmt: skip
    for change in wrong:
        with raises("ConfigError"):
            cache.update_policy(**change)
        agree(subject, cache, tiers, f"after the policy {change} was refused")


@check("TIER-10", "tiered")
def a_policy_is_looked_at_as_a_whole(subject: Subject) -> None:
    """Two fields that make sense together, and either of which alone would not."""
    cache, tiers = both(subject, max_tokens=6, tail_length=2, warm_length=4)
    append(subject, cache, tiers, 6)
    for lengths in ({"tail_length": 5, "warm_length": 1}, {"warm_length": 5, "tail_length": 1}):
        for part in (cache, tiers):
            part.update_policy(**lengths)
        agree(subject, cache, tiers, f"after {lengths}")
        append(subject, cache, tiers, 2)
        agree(subject, cache, tiers, f"2 tokens after {lengths}")


@check("TIER-11", "tiered")
def each_head_attends_by_itself(subject: Subject) -> None:
    cache = new(subject, "tiered", tail_length=20, tail_dtype="float32")
    keys, values = np.zeros((2, HEADS, 5), np.float32), np.zeros((2, HEADS, 5), np.float32)
    keys[0, 0, 0] = keys[1, 1, 0] = 100  # head 0 looks at token 0, head 1 at token 1
    values[0], values[1] = 1, 2
    cache.append(keys, values)
    query = np.zeros((1, HEADS, 5), np.float32)
    query[..., 0] = 1
    want = np.array([[[1.0] * 5, [2.0] * 5]], np.float32)
    same(cache.attend(query, 1.0), want, "attention of two heads that look at different tokens")


@check("TIER-12", "tiered")
def appends_from_threads_lose_and_tear_nothing(subject: Subject) -> None:
    each = 25
    total = THREADS * each
    cache = new(subject, "tiered", max_tokens=total, tail_length=total, tail_dtype="float32")

    def work(thread: int, rng: np.random.Generator) -> None:
        for i in range(each):
            rows = np.full((1, HEADS, 5), thread * each + i, np.float32)
            cache.append(rows, -rows)

    in_threads(subject, work)
    keys, values = cache.read()
    equal(len(keys), total, f"tokens after {THREADS} threads appended {each} each")
    same(values, -keys, "values of each token, against its keys")
    marks = keys[:, 0, 0].astype(int).tolist()
    equal(sorted(marks), list(range(total)), "tokens found")
    for thread in range(THREADS):
        own = [mark for mark in marks if mark // each == thread]
        equal(own, sorted(own), f"order of the tokens of thread {thread}")


@check("TIER-12", "tiered")
def readers_beside_writers_see_whole_tokens(subject: Subject) -> None:
    cache = new(subject, "tiered", max_tokens=200, tail_length=200, tail_dtype="float32")
    appended = list[int]()

    def work(thread: int, rng: np.random.Generator) -> None:
        for i in range(15):
            rows = np.full((int(rng.integers(1, 4)), HEADS, 5), 100 * thread + i, np.float32)
            cache.append(rows, -rows)
            appended.append(len(rows))
            keys, values = cache.read()
            same(values, -keys, "values read beside writers, against their keys")
            stats = cache.stats()
            parts = stats.tail_tokens + stats.warm_tokens + stats.store_tokens
            equal(parts, stats.total_tokens, "tokens of all tiers, beside writers")

    in_threads(subject, work)
    equal(cache.total_tokens, sum(appended), "tokens, after all threads have ended")


@check("TIER-13", "tiered")
def a_value_the_tail_cannot_hold_is_refused_at_append(subject: Subject) -> None:
    subject.formats("float16")
    cache, tiers = both(subject)
    append(subject, cache, tiers, 6)
    for bad in (65520.0, -1e30, np.nan, np.inf):
        for which in (0, 1):
            rows = [tokens(subject, 2), tokens(subject, 2)]
            rows[which][1, 1, 3] = bad
            with raises("NonFinite"):
                cache.append(*rows)
            agree(subject, cache, tiers, f"after {bad} was refused")
    edge = np.full((1, HEADS, 5), 65504.0, np.float32)
    cache.append(edge, edge)
    tiers.append(edge, edge)
    agree(subject, cache, tiers, "after float16's largest number was appended")


@check("TIER-13", "tiered")
def a_token_no_store_can_hold_is_refused_at_append(subject: Subject) -> None:
    wide = np.zeros((1, HEADS, DIM), np.float32)
    wide[0, 0, 0], wide[0, 1, 4] = 3e38, -3e38  # each is finite, their distance is not
    for tail in (4, 0):
        cache, tiers = both(subject, tail_dtype="float32", tail_length=tail)
        append(subject, cache, tiers, 6)
        with raises("NonFinite"):
            cache.append(wide, wide)
        agree(subject, cache, tiers, "after a token whose range overflows was refused")
        large = np.full_like(wide, 8e37)
        large[0, 0, 0] *= -1
        cache.append(large, large / 2)
        equal(cache.total_tokens, 7, "tokens after a large one whose range does not overflow")


@check("TIER-13", "tiered")
def a_token_is_looked_at_as_the_tail_holds_it(subject: Subject) -> None:
    """A bfloat16 tail rounds up: the range of what comes is finite, that of what moves on is not."""
    wide = np.full((1, HEADS, DIM), 2.0**127 * (1 - 2.0**-10), np.float32)
    wide[0, 0, 0] *= -1
    cache, tiers = both(subject, tail_dtype="bfloat16", tail_length=1)
    append(subject, cache, tiers, 3)
    with raises("NonFinite"):
        cache.append(wide, wide)
    append(subject, cache, tiers, 3)
    agree(subject, cache, tiers, "after a token whose range overflows once the tail has rounded it was refused")


@check("TIER-13", "tiered")
def what_was_taken_can_move_on(subject: Subject) -> None:
    """Through a warm tier, whose reading back may be larger than what came."""
    for magnitude in np.array([2.0**125, 2.0**126, 2.0**127 * (1 - 2.0**-24), 3.4028235e38], np.float32):
        for warm in subject.formats("q8", "int8"):
            sizes = {"tail_dtype": "float32", "tail_length": 1, "warm_length": 1, "warm_format": warm, "store_format": "q4"}
            cache, token = new(subject, "tiered", **sizes), np.full((1, HEADS, DIM), magnitude, np.float32)
            for sign in (1, -1):
                token[0, 1, 0] = sign * magnitude
                with may_raise("NonFinite"):
                    cache.append(token, token)
            before = cache.total_tokens
            cache.append(*pair_of_tokens(subject, 3))
            equal(cache.total_tokens, before + 3, f"tokens after 3 more behind some of {magnitude}")


@check("TIER-16", "tiered")
def memory_follows_the_policy(subject: Subject) -> None:
    subject.in_this_process()
    sizes = {"num_kv_heads": 8, "head_dim": 64, "max_tokens": 2048, "tail_length": 1024, "tail_dtype": "float32"}
    cache, tail, token = new(subject, "tiered", **sizes), 1024 * 8 * 64 * 8, np.ones((1, 8, 64), np.float32)
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tail_length": 1000}, {"tail_length": 1024}), ({"warm_length": 500}, {"warm_length": 512}),
        ({"store_format": "q8"}, {"store_format": "q4"}), ({"tail_dtype": "float16"}, {"tail_dtype": "float32"}),
    ]  # fmt: skip
    for held in ("no token", "tokens in every tier"):
        for change, back in changes:
            formats = [value for value in (*change.values(), *back.values()) if isinstance(value, str)]
            if not set(formats) <= set(subject.implementation.formats):
                continue
            memory = list[int]()
            for _ in range(2):
                for each in 40 * (change, back):
                    cache.update_policy(**each)
                if (size := data_bytes()) is None:
                    raise NotOffered("a system that says how much memory a process has")
                memory.append(size)
            what = f"growth by 80 times {change} and back, with {held}"
            true(memory[1] - memory[0] < 10 * tail, what, f"less than {10 * tail} bytes", memory[1] - memory[0])
        cache.update_policy(tail_length=2, warm_length=2)
        for _ in range(6):
            cache.append(token, token)


@check("TIER-14", "tiered")
def the_warm_tier_lies_between(subject: Subject) -> None:
    for warm, store in (("q8", "q4"), ("q4", "q8")):
        cache, tiers = both(subject, tail_length=2, warm_length=3, warm_format=warm, store_format=store, max_tokens=12)
        for count in (2, 1, 1, 5, 1, 4):
            append(subject, cache, tiers, count)
            agree(subject, cache, tiers, f"with a warm tier of 3 in {warm}, after {tiers.appended} tokens")


@check("TIER-15", "tiered")
def tail_only_quantizes_nothing(subject: Subject) -> None:
    cache, (keys, values) = new(subject, "tiered", max_tokens=9, tail_length=9), pair_of_tokens(subject, 13)
    for start in range(0, 13, 2):
        cache.append(keys[start : start + 2], values[start : start + 2])
    want = (round_to(keys[-9:], "float16"), round_to(values[-9:], "float16"))
    pair(cache.read(), want, "a cache that is all tail")
    equal(cache.stats().store_tokens, 0, "tokens in the store")


@check("TIER-15", "tiered")
def store_only_quantizes_the_input_itself(subject: Subject) -> None:
    for name in subject.formats("q8", "q4"):
        cache, (keys, values) = new(subject, "tiered", tail_length=0, store_format=name), pair_of_tokens(subject, 7)
        cache.append(keys, values)
        want = [stacked(through(given(token), name) for token in part) for part in (keys, values)]
        reads(subject, cache.read(), (want[0], want[1]), f"a cache that is all {name} store")
        true(cache.tier_of(6) == "store", "tier of the newest token", "store", cache.tier_of(6))


@check("TIER-15", "tiered")
def a_store_of_head_rows_scales_each_head(subject: Subject) -> None:
    """A store may hold the formats of the quantized cache too, where it has them."""
    cache, (keys, values) = new(subject, "tiered", tail_length=0), pair_of_tokens(subject, 5)
    try:
        cache.update_policy(store_format="int8")
    except Exception as error:
        raise NotOffered("a tiered store in int8") from error
    cache.append(keys, values)
    reads(subject, cache.read(), (read_as(keys, "int8"), read_as(values, "int8")), "a cache that is all int8 store")
