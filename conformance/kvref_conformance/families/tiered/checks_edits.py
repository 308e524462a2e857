"""EDIT: truncation of the tiered cache, which is required if the removed tokens caused no migration or eviction."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvref_conformance.checking.expect import equal, may_raise, pair, raises, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, held, made, new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import allowed, append, both, change, tail_of
from kvref_conformance.families.tiered.tiers import Tiers
from kvref_conformance.oracle.formats import AFFINE, PLAIN, SYMMETRIC
from kvref_conformance.outcome import NotOffered

LOUD = 2.0**8
ROOM = 9
Both = tuple[Handle, Tiers]


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


def room_left(tiers: Tiers) -> int:
    """Number of tokens that can be appended before a token migrates."""
    newest: int = next(tiers.policy[name] for name in ("tail_length", "warm_length", "max_tokens") if tiers.policy[name])
    return newest - len(tiers.tokens)


def draft(subject: Subject, cache: Handle, tiers: Tiers, count: int) -> None:
    """Append tokens that are much larger than the others."""
    keys, values = (held(subject, part * LOUD) for part in pair_of_tokens(subject, count))
    cache.append(keys, values)
    tiers.append(keys, values)


def never(subject: Subject, cache: Handle, tiers: Tiers) -> Handle:
    """A new cache of the same sizes, after the appends and policy changes of the oracle's history."""
    other = made(subject, "tiered", **cache.config)
    for each in tiers.came:
        if isinstance(each, dict):
            other.update_policy(**each)
        else:
            other.append(*each)
    return other


def same_caches(got: Handle, want: Handle, positions: range, when: str) -> None:
    """Check that two caches have equal tokens, tiers and statistics."""
    pair(got.read(), want.read(), f"tokens of a cache {when}")
    equal(dict(got.stats()), dict(want.stats()), f"statistics {when}")
    equal([got.tier_of(position) for position in positions], [want.tier_of(position) for position in positions], f"tiers {when}")


def as_if_nothing_had_gone(subject: Subject, cache: Handle, tiers: Tiers, when: str) -> None:
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
            equal(cache.total_tokens, kept, f"number of tokens with {name}, after truncate({length})")
            pair(
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


def seen(cache: Handle) -> tuple[Any, dict[str, Any]]:
    return cache.read(), dict(cache.stats())


def unchanged(cache: Handle, before: tuple[Any, dict[str, Any]], when: str) -> None:
    pair(cache.read(), before[0], f"tokens of a cache {when}")
    equal(dict(cache.stats()), before[1], f"statistics {when}")


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


def refuses(cache: Handle, length: int) -> bool:
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
        equal(cache.total_tokens, 0, f"total_tokens after truncate(0) of {count} tokens")
        same(cache.read()[0], keys[:0], f"keys that read returned after truncate(0) of {count} tokens")
