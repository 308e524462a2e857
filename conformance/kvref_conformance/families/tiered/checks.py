"""TIER: the tier of each token, and its dequantized rows."""

from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.checking.attending import exact
from kvref_conformance.checking.expect import equal, pair, raises, reads, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, fitted, formats_of, made, new, pair_of_tokens, takes, tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.families.tiered.tiers import POLICY, Tiers
from kvref_conformance.oracle.formats import PLAIN, SYMMETRIC
from kvref_conformance.outcome import NotOffered


def both(subject: Subject, **changes: Any) -> tuple[Handle, Tiers]:
    """A cache and the oracle's list of tokens, with the same policy.

    If the tiers are longer than the check requests, tokens are appended to both until exactly the requested room is left.
    """
    asked = all_families()["tiered"].small | changes
    config = fitted(subject, "tiered", **changes)
    longer = max(0, sum(config[name] - asked[name] for name in ("tail_length", "warm_length")))
    config = fitted(subject, "tiered", **changes | {"max_tokens": asked["max_tokens"] + longer})
    cache, tiers = made(subject, "tiered", **config), Tiers(**{name: config[name] for name in POLICY})
    if longer:
        append(subject, cache, tiers, longer)
    return cache, tiers


def change(cache: Handle, tiers: Tiers, **policy: Any) -> None:
    cache.update_policy(**policy)
    tiers.update_policy(**policy)


def allowed(subject: Subject, **policy: Any) -> None:
    """Raises NotOffered if the limits exclude one of these values. The check has no use for other values."""
    for name, value in policy.items():
        if not takes(subject, name, value):
            raise NotOffered(f"{name} {value}, where its limits say {subject.limits.of('tiered', name)}")


def tail_of(subject: Subject, *wanted: str) -> str:
    """The first supported tail dtype of `wanted`, or of all plain dtypes if none is given."""
    return formats_of(subject, "tail_dtype", *(wanted or PLAIN))[0]


def two_stores(subject: Subject) -> tuple[str, str]:
    """Two store formats: q4 and q8, or the supported one twice if only one is supported."""
    first, *_, last = formats_of(subject, "store_format", "q4", "q8") * 2
    return first, last


def append(subject: Subject, cache: Handle, tiers: Tiers, count: int) -> None:
    keys, values = pair_of_tokens(subject, count, cache.config["num_kv_heads"], cache.config["head_dim"])
    cache.append(keys, values)
    tiers.append(keys, values)


def agree(subject: Subject, cache: Handle, tiers: Tiers, when: str) -> None:
    stats = cache.stats()
    got = (stats.total_tokens, stats.tail_tokens, stats.warm_tokens, stats.store_tokens)
    want = (len(tiers.tokens), tiers.count("tail"), tiers.count("warm"), tiers.count("store"))
    equal(got, want, f"number of tokens in total, in the tail, the warm tier and the store, {when}")
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
        pair(
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
            equal(
                (stats.total_tokens, cache.total_tokens, total),
                (min(most, appended),) * 3,
                f"total_tokens in stats, total_tokens and the sum of the tiers after {appended} tokens",
            )
            equal(len(cache.read()[0]), min(most, appended), f"number of tokens that read returned after {appended} tokens")


@check("TIER-07ab", "tiered")
def positions_are_absolute(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=9, tail_length=2, warm_length=3)
    for count in (4, 3, 1, 6):
        append(subject, cache, tiers, count)
        for token in tiers.tokens:
            equal(cache.tier_of(token.position), token.tier, f"tier of position {token.position} after {tiers.appended} tokens")
        for position in subject.integers(-1, tiers.appended, tiers.tokens[0].position - 1):
            with raises("PositionOutOfRange"):
                cache.tier_of(position)


@check("TIER-08ab", "tiered")
def statistics_count_the_bytes_stored(subject: Subject) -> None:
    heads, width = subject.heads, subject.heads * subject.dim
    token_bytes = {"float32": 4 * width, "float16": 2 * width, "bfloat16": 2 * width, "q8": width + 8, "q4": -(-width // 2) + 8}
    token_bytes |= dict.fromkeys(SYMMETRIC, width + 4 * heads)
    equal(new(subject, "tiered").stats().compression_ratio, 1.0, "compression_ratio of an empty cache")
    for tail, store in product(formats_of(subject, "tail_dtype", *PLAIN), formats_of(subject, "store_format", "q4", "q8")):
        cache, tiers = both(subject, tail_dtype=tail, store_format=store, warm_length=2)
        append(subject, cache, tiers, 11)  # 4 in the tail, 2 warm, 5 in the store
        stats, formats = cache.stats(), {"tail": tail, "warm": cache.config["warm_format"], "store": store}
        want = tuple(2 * tiers.count(tier) * token_bytes[format] for tier, format in formats.items())
        equal(
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
    good = tokens(subject, subject.size("tokens", 2))
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
    _, bound = exact(subject, query, *cache.read(), scale=1.0)
    within(cache.attend(query, 1.0), want, bound, "attention of heads whose weight is on different tokens")
