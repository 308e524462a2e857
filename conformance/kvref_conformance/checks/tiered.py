"""TIER: what is in which tier, and what it reads as."""

from typing import Any

import numpy as np

from kvref_conformance.checking.expect import equal, pair, raises, reads, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import DIM, HEADS, SMALL, new, pair_of_tokens, tokens
from kvref_conformance.drivers.in_process import Handle, Subject
from kvref_conformance.oracle.tiers import Tiers

POLICY = ("tail_length", "tail_dtype", "warm_length", "warm_format", "store_format", "max_tokens")


def both(subject: Subject, **changes: Any) -> tuple[Handle, Tiers]:
    """A cache and the oracle's list of tokens, with the same policy."""
    config = SMALL["tiered"] | changes
    return new(subject, "tiered", **changes), Tiers(**{name: config[name] for name in POLICY})


def append(subject: Subject, cache: Handle, tiers: Tiers, count: int) -> None:
    keys, values = pair_of_tokens(subject, count)
    cache.append(keys, values)
    tiers.append(keys, values)


def agree(subject: Subject, cache: Handle, tiers: Tiers, when: str) -> None:
    stats = cache.stats()
    got = (stats.total_tokens, stats.tail_tokens, stats.warm_tokens, stats.store_tokens)
    want = (len(tiers.tokens), tiers.count("tail"), tiers.count("warm"), tiers.count("store"))
    equal(got, want, f"tokens in all, in tail, warm tier and store, {when}")
    if tiers.tokens:
        reads(subject, cache.read(), tiers.read(), f"the cache {when}")


@check("TIER-01", "tiered")
def the_newest_tokens_are_in_the_tail(subject: Subject) -> None:
    for dtype in subject.formats("float16", "bfloat16", "float32"):
        cache, tiers = both(subject, tail_dtype=dtype)
        for step, count in enumerate((1, 2, 1, 1, 6, 1)):
            append(subject, cache, tiers, count)
            agree(subject, cache, tiers, f"with a {dtype} tail, after append {step + 1}")


@check("TIER-02", "tiered")
def tokens_are_quantized_once_from_what_the_tail_held(subject: Subject) -> None:
    for name in subject.formats("q8", "q4"):
        cache, tiers = both(subject, store_format=name)
        append(subject, cache, tiers, 6)
        before = cache.read()
        for _ in range(5):
            append(subject, cache, tiers, 1)
        agree(subject, cache, tiers, f"with a {name} store, decoded one token at a time")
        after = cache.read()
        pair((after[0][:2], after[1][:2]), (before[0][:2], before[1][:2]), "the two tokens stored first, later")


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
            agree(subject, cache, tiers, f"with migration_batch {batch}")


@check("TIER-05", "tiered")
def the_oldest_tokens_are_evicted(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=7)
    for count in (6, 1, 1, 3, 7, 2):
        append(subject, cache, tiers, count)
        true(cache.total_tokens <= 7, "tokens held", "at most 7", cache.total_tokens)
        agree(subject, cache, tiers, f"of at most 7 tokens after {tiers.appended}")


@check("TIER-05", "tiered")
def an_append_longer_than_the_cache_keeps_its_end(subject: Subject) -> None:
    for count in (7, 8, 15, 30):
        cache, tiers = both(subject, max_tokens=7)
        append(subject, cache, tiers, 2)
        append(subject, cache, tiers, count)
        agree(subject, cache, tiers, f"of at most 7 tokens after an append of {count}")


@check("TIER-06", "tiered")
def the_total_is_the_sum_of_the_tiers(subject: Subject) -> None:
    for tail in (0, 2, 6):  # with a tail of 6 = max_tokens, eviction is from the tail
        cache = new(subject, "tiered", max_tokens=6, tail_length=tail)
        for appended in range(1, 12):
            cache.append(*pair_of_tokens(subject, 1))
            stats = cache.stats()
            total = stats.tail_tokens + stats.warm_tokens + stats.store_tokens
            equal((stats.total_tokens, cache.total_tokens, total), (min(6, appended),) * 3, f"totals after {appended} tokens")
            equal(len(cache.read()[0]), min(6, appended), "tokens read")


@check("TIER-07", "tiered")
def positions_are_absolute(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=9, tail_length=2, warm_length=3)
    for count in (4, 3, 1, 6):
        append(subject, cache, tiers, count)
        for token in tiers.tokens:
            equal(cache.tier_of(token.position), token.tier, f"tier of position {token.position} of {tiers.appended}")
        for position in (-1, tiers.appended, tiers.tokens[0].position - 1):
            with raises("PositionOutOfRange"):
                cache.tier_of(position)


@check("TIER-08", "tiered")
def statistics_count_the_bytes_stored(subject: Subject) -> None:
    width = HEADS * DIM
    token_bytes = {"float16": 2 * width, "float32": 4 * width, "q8": width + 8, "q4": -(-width // 2) + 8}
    for tail, store in (("float16", "q4"), ("float32", "q8"), ("float16", "q8")):
        cache = new(subject, "tiered", tail_dtype=tail, store_format=store, warm_length=2)
        equal(cache.stats().compression_ratio, 1.0, "ratio of an empty cache")
        cache.append(*pair_of_tokens(subject, 11))  # 4 in the tail, 2 warm, 5 in the store
        stats = cache.stats()
        want = (2 * 4 * token_bytes[tail], 2 * 2 * token_bytes["q8"], 2 * 5 * token_bytes[store])
        equal((stats.tail_bytes, stats.warm_bytes, stats.store_bytes), want, f"bytes of tail {tail}, warm q8, store {store}")
        ratio = 11 * 2 * 4 * width / sum(want)
        true(abs(stats.compression_ratio - ratio) < 1e-6, "ratio", str(ratio), stats.compression_ratio)


@check("TIER-09", "tiered")
def keys_of_no_whole_token_are_refused(subject: Subject) -> None:
    cache, tiers = both(subject)
    append(subject, cache, tiers, 6)
    good = tokens(subject, 2)
    more = np.concatenate([good, good[:1]])  # wrong beside two tokens, and right beside itself
    for bad in (good[:, :, :-1], good[:, :-1], good.reshape(-1)[:-1], good.reshape(-1), more):
        for pair_given in ((bad, good), (good, bad), *([] if bad is more else [(bad, bad)])):
            with raises("ShapeMismatch"):
                cache.append(*pair_given)
        agree(subject, cache, tiers, f"after keys or values {list(bad.shape)} were refused")
