"""EDIT: truncation of the tiered cache, which is required if the removed tokens caused no migration or eviction."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvref_conformance.calls.messages import error_of
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.tiered.checks import allowed, append, both, change, tail_of
from kvref_conformance.families.tiered.tier_model import TierModel
from kvref_conformance.oracle.formats import AFFINE, PLAIN, SYMMETRIC
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_same, may_raise, raises
from kvref_conformance.testlib.fixtures import (
    at_least,
    construct,
    formats_of,
    new,
    pair_of_tokens,
    round_to_input_dtype,
    supports,
)
from kvref_conformance.testlib.registry import check

LOUD = 2.0**8
ROOM = 9
Both = tuple[ObjectProxy, TierModel]


def forms(subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    """A policy of each form (TIER-15), for every format that its newest tokens may have."""
    for dtype in formats_of(subject, "tail_dtype", *PLAIN):
        yield f"a {dtype} tail", {"tail_dtype": dtype, "tail_length": ROOM, "warm_length": 2}
    yield "a tail without other tiers", {"tail_length": 20, "tail_dtype": tail_of(subject)}
    for name in formats_of(subject, "store_format", *AFFINE, *SYMMETRIC):
        yield f"a {name} store without other tiers", {"tail_length": 0, "store_format": name}
    for name in formats_of(subject, "warm_format", *AFFINE, *SYMMETRIC):
        yield f"a {name} warm tier without a tail", {"tail_length": 0, "warm_length": ROOM, "warm_format": name}


def every_form(subject: Subject) -> Iterator[tuple[str, Both]]:
    """Caches to which ROOM tokens can be appended without migration. Raises NotOffered if no form has such a cache."""
    found = False
    for name, policy in forms(subject):
        with suppress(NotOffered):
            cache, tiers = both(subject, **policy)
            if room_left(tiers) < ROOM:
                continue
            yield name, (cache, tiers)
            found = True
    if not found:
        raise NotOffered(f"room for {ROOM} tokens before one migrates")


def room_left(tiers: TierModel) -> int:
    """Number of tokens that can be appended before a token migrates."""
    newest: int = next(tiers.policy[name] for name in ("tail_length", "warm_length", "max_tokens") if tiers.policy[name])
    return newest - len(tiers.tokens)


def draft(subject: Subject, cache: ObjectProxy, tiers: TierModel, count: int) -> None:
    """Append tokens that are much larger than the others."""
    keys, values = (round_to_input_dtype(subject, part * LOUD) for part in pair_of_tokens(subject, count))
    cache.append(keys, values)
    tiers.append(keys, values)


def never(subject: Subject, cache: ObjectProxy, tiers: TierModel) -> ObjectProxy:
    """A new cache of the same sizes, after the appends and policy changes of the oracle's history."""
    other = construct(subject, "tiered", **cache.config)
    for each in tiers.came:
        if isinstance(each, dict):
            other.update_policy(**each)
        else:
            other.append(*each)
    return other


def same_caches(got: ObjectProxy, want: ObjectProxy, positions: range, when: str) -> None:
    """Check that two caches have equal tokens, tiers and statistics."""
    assert_pair(got.read(), want.read(), f"tokens of a cache {when}")
    assert_equal(dict(got.stats()), dict(want.stats()), f"statistics {when}")
    assert_equal(
        [got.tier_of(position) for position in positions], [want.tier_of(position) for position in positions], f"tiers {when}"
    )


def as_if_nothing_had_gone(subject: Subject, cache: ObjectProxy, tiers: TierModel, when: str) -> None:
    held = range(tiers.appended - len(tiers.tokens), tiers.appended)
    same_caches(
        cache,
        never(subject, cache, tiers),
        held,
        f"{when}, compared with a cache to which the truncated tokens were never appended",
    )


@check("EDIT-01abc", "tiered")
def the_first_tokens_stay(subject: Subject) -> None:
    for name, (cache, tiers) in every_form(subject):
        begun = tiers.appended
        append(subject, cache, tiers, 7)
        for length in (begun + 5, begun + 2, *([0] if not begun else [])):
            before = cache.read()
            cache.truncate(length)
            kept = min(length, cache.config["max_tokens"])
            assert_equal(cache.total_tokens, kept, f"number of tokens with {name}, after truncate({length})")
            assert_pair(
                cache.read(),
                (before[0][:kept], before[1][:kept]),
                f"the first {kept} tokens with {name} after truncate({length}), compared with before",
            )
            with raises("PositionOutOfRange"):
                cache.tier_of(length)


@check("EDIT-02ab", "tiered")
def no_more_tokens_stay_than_came(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=7)
    for count in (3, 6, 4):  # no token has migrated, then some have, then some are evicted
        append(subject, cache, tiers, count)
        came, before = tiers.appended, seen(cache)
        for length in subject.integers(came + 1, came + 20, -1, -came, -came - 1):
            with raises("PositionOutOfRange"):
                cache.truncate(length)
            unchanged(cache, before, f"after truncate({length}) of {came} tokens raised PositionOutOfRange")
        cache.truncate(came)
        unchanged(cache, before, f"after truncate({came}) of {came} tokens")


def seen(cache: ObjectProxy) -> tuple[Any, dict[str, Any]]:
    return cache.read(), dict(cache.stats())


def unchanged(cache: ObjectProxy, before: tuple[Any, dict[str, Any]], when: str) -> None:
    assert_pair(cache.read(), before[0], f"tokens of a cache {when}")
    assert_equal(dict(cache.stats()), before[1], f"statistics {when}")


@check("EDIT-03", "tiered")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    """Later tokens migrate and are evicted as if the removed tokens had left no scale and used no slot."""
    for name, (cache, tiers) in every_form(subject):
        begun = tiers.appended
        for length, more in ((begun, 3), (begun + 2, 2), (begun + 5, 1)):  # the last truncate keeps one of the two draft tokens
            draft(subject, cache, tiers, 2)
            cache.truncate(length)
            tiers = tiers.before(length)
            as_if_nothing_had_gone(subject, cache, tiers, f"with {name}, after truncate({length})")
            append(subject, cache, tiers, more)
            as_if_nothing_had_gone(subject, cache, tiers, f"with {name}, {more} tokens after truncate({length})")
        for count in (4, 1, 6, 9):
            append(subject, cache, tiers, count)
            as_if_nothing_had_gone(subject, cache, tiers, f"with {name}, at {tiers.appended} tokens after earlier truncations")


@check("EDIT-03", "tiered")
def policies_that_changed_before_stay_changed(subject: Subject) -> None:
    cache, tiers = both(subject, tail_length=ROOM, warm_length=2)
    begun = tiers.appended
    append(subject, cache, tiers, 3)
    shorter = {name: cache.config[name] - 1 for name in ("tail_length", "warm_length") if cache.config[name]}
    allowed(subject, **shorter)
    change(cache, tiers, **shorter)
    if tiers.moved_at > begun or room_left(tiers) < 2:
        raise NotOffered("a shorter tail with room for the stored tokens and 2 more")
    draft(subject, cache, tiers, 2)
    cache.truncate(begun + 3)
    tiers = tiers.before(begun + 3)
    for count in (5, 1, 2, 6):
        append(subject, cache, tiers, count)
        as_if_nothing_had_gone(
            subject, cache, tiers, f"with a tail that was shortened, at {tiers.appended} tokens after a truncated draft"
        )


@check("EDIT-06b", "tiered")
def what_has_moved_on_comes_back_or_says_so(subject: Subject) -> None:
    for tail, warm, most in ((4, 0, 20), (3, 2, 20), (0, 3, 20), (4, 0, 7), (6, 0, 6)):
        for fewer in (1, 3, 8):
            cache, tiers = both(subject, tail_length=tail, warm_length=warm, max_tokens=most)
            begun = tiers.appended
            append(subject, cache, tiers, 9)
            length, before = max(begun, tiers.appended - fewer), seen(cache)
            when = f"with tail_length {tail}, warm_length {warm} and max_tokens {most}, after truncate({length})"
            if refuses(cache, length):
                unchanged(cache, before, f"{when} raised NotTruncatable")
            else:
                tiers = tiers.before(length)
                append(subject, cache, tiers, 2)
                as_if_nothing_had_gone(subject, cache, tiers, f"{when} and an append of 2 tokens")


def refuses(cache: ObjectProxy, length: int) -> bool:
    """Whether `truncate` raises NotTruncatable."""
    went = False
    with may_raise("NotTruncatable"):
        cache.truncate(length)
        went = True
    return not went


@check("EDIT-06a", "tiered")
def what_nothing_has_moved_on_for_can_go(subject: Subject) -> None:
    """Older tokens are in the store, but the removed tokens were appended to a tail that had room for them."""
    cache, tiers = both(subject, tail_length=2)
    append(subject, cache, tiers, 5)
    longer = cache.config["tail_length"] + 4
    allowed(subject, tail_length=longer)
    at_least(cache, max_tokens=max(longer + cache.config["warm_length"], len(tiers.tokens) + 2))
    change(cache, tiers, tail_length=longer)
    came = tiers.appended
    append(subject, cache, tiers, 2)
    for length in (came + 1, came):
        cache.truncate(length)
        tiers = tiers.before(length)
        as_if_nothing_had_gone(subject, cache, tiers, f"with a tail that was lengthened, after truncate({length})")
    append(subject, cache, tiers, 7)
    as_if_nothing_had_gone(subject, cache, tiers, "with a tail that was lengthened, after truncate and an append of 7 tokens")


@check("EDIT-06a", "tiered")
def an_empty_cache_can_stay_empty(subject: Subject) -> None:
    cache = new(subject, "tiered")
    keys, values = pair_of_tokens(subject, 1)
    for count in (0, 1):
        cache.append(keys[:count], values[:count])
        cache.truncate(0)
        assert_equal(cache.total_tokens, 0, f"total_tokens after truncate(0) of {count} tokens")
        assert_same(cache.read()[0], keys[:0], f"keys that read returned after truncate(0) of {count} tokens")


# MOVE: `load` restores every token in its tier and format.


def is_as(loaded: ObjectProxy, cache: ObjectProxy, when: str) -> None:
    total = cache.total_tokens
    assert_equal(loaded.total_tokens, total, f"total_tokens of a loaded cache {when}, compared with the saved cache")
    with suppress(NotOffered):
        assert_equal(dict(loaded.stats()), dict(cache.stats()), f"stats of a loaded cache {when}, compared with the saved cache")
    assert_pair(loaded.read(), cache.read(), f"tokens of a loaded cache {when}, compared with the saved cache")


def tiers_of(cache: ObjectProxy, first: int, stop: int) -> list[str]:
    return [cache.tier_of(position) for position in range(first, stop)]


def truncated(cache: ObjectProxy, length: int) -> str:
    """Returns "truncated", or the kind of the error that `truncate` raises."""
    try:
        cache.truncate(length)
    except (NotOffered, Broken):
        raise
    except Exception as error:
        return error_of(error).kind
    return "truncated"


def moved(subject: Subject, cache: ObjectProxy, count: int, when: str) -> None:
    """Check that a loaded copy of a cache with `count` appended tokens equals it, also after later appends and truncations."""
    loaded = construct(subject, "tiered", **cache.config)
    loaded.load(cache.save())
    is_as(loaded, cache, when)
    for more in (1, 4):
        first = count - cache.total_tokens
        assert_equal(
            tiers_of(loaded, first, count),
            tiers_of(cache, first, count),
            f"tiers of positions [{first}, {count}) of a loaded cache {when}",
        )
        if first:
            with raises("PositionOutOfRange"):
                loaded.tier_of(first - 1)
        keys, values = pair_of_tokens(subject, more)
        for each in (cache, loaded):
            each.append(keys, values)
        count += more
        is_as(loaded, cache, f"{when}, after load and an append of {more} tokens")
        loaded = construct(subject, "tiered", **cache.config)
        loaded.load(cache.save())
    for length in (count - 2, count):  # removes tokens whose append migrated others, then none
        with suppress(NotOffered):
            assert_equal(
                truncated(loaded, length),
                truncated(cache, length),
                f"the result of truncate({length}) on a loaded cache {when}, compared with the saved cache",
            )
    is_as(loaded, cache, f"{when}, after load and truncate")


@check("MOVE-01ac", "tiered")
def tiers_and_positions_are_those_that_were_saved(subject: Subject) -> None:
    for warm in dict.fromkeys(subject.size("warm_length", wanted) for wanted in (0, 3)):
        cache, tiers = both(subject, warm_length=warm)
        append(subject, cache, tiers, 7)
        moved(subject, cache, tiers.appended, f"with warm_length {warm}")
        cache, tiers = both(subject, warm_length=warm)
        append(subject, cache, tiers, cache.config["max_tokens"] + 3)
        moved(subject, cache, tiers.appended, f"with warm_length {warm}, after the first tokens were evicted")


@check("MOVE-01bc", "tiered")
def tokens_stay_in_the_format_that_they_came_in(subject: Subject) -> None:
    cache, tiers = both(subject, warm_length=0)
    others = [name for name in ("q8", "q4", "int8") if supports(subject, "store_format", name)]
    others = [name for name in others if name != cache.config["store_format"]]
    if not others:
        raise NotOffered("a second store format")
    append(subject, cache, tiers, cache.config["tail_length"] + 3)
    for name in (others[0], cache.config["store_format"]):  # another format, then the original one again
        cache.update_policy(store_format=name)
        tiers.update_policy(store_format=name)
        append(subject, cache, tiers, 2)
    moved(subject, cache, tiers.appended, "after two changes of its store format")
