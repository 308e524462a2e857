"""EDIT: the tiered cache goes back, where nothing has moved on for what goes, and says so where it cannot."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvref_conformance.checking.expect import equal, may_raise, pair, raises, same, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import formats_of, held, made, new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import agree, append, both, tail_of
from kvref_conformance.families.tiered.tiers import Tiers
from kvref_conformance.oracle.formats import AFFINE, PLAIN, SYMMETRIC
from kvref_conformance.outcome import NotOffered

LOUD = 2.0**8
Both = tuple[Handle, Tiers]


def forms(subject: Subject) -> Iterator[tuple[str, dict[str, Any]]]:
    """A policy of each form (TIER-15), at every format that its newest tokens may have."""
    for dtype in formats_of(subject, "tail_dtype", *PLAIN):
        yield f"a {dtype} tail", {"tail_dtype": dtype, "tail_length": 9, "warm_length": 2}
    yield "a tail alone", {"tail_length": 20, "tail_dtype": tail_of(subject)}
    for name in formats_of(subject, "store_format", *AFFINE, *SYMMETRIC):
        yield f"a {name} store alone", {"tail_length": 0, "store_format": name}
    for name in formats_of(subject, "warm_format", *AFFINE, *SYMMETRIC):
        yield f"a {name} warm tier and no tail", {"tail_length": 0, "warm_length": 9, "warm_format": name}


def every_form(subject: Subject) -> Iterator[tuple[str, Both]]:
    """Caches with room for 9 tokens before any has to move on. Raises NotOffered where there is none of these forms."""
    found = False
    for name, policy in forms(subject):
        with suppress(NotOffered):
            yield name, both(subject, **policy)
            found = True
    if not found:
        raise NotOffered("a policy of any form")


def draft(subject: Subject, cache: Handle, tiers: Tiers, count: int) -> None:
    """Tokens far louder than the others."""
    keys, values = (held(subject, part * LOUD) for part in pair_of_tokens(subject, count))
    cache.append(keys, values)
    tiers.append(keys, values)


def go_back(subject: Subject, cache: Handle, tiers: Tiers, length: int, when: str) -> Tiers:
    """Truncate to a length, and see that all is as the oracle's tokens before it say."""
    cache.truncate(length)
    tiers = tiers.before(length)
    agree(subject, cache, tiers, f"{when}, after truncate({length})")
    for token in tiers.tokens:
        equal(cache.tier_of(token.position), token.tier, f"tier of position {token.position}, {when}, after truncate({length})")
    return tiers


@check("EDIT-01", "tiered")
def the_first_tokens_stay(subject: Subject) -> None:
    for name, (cache, tiers) in every_form(subject):
        begun = tiers.appended
        append(subject, cache, tiers, 7)
        for length in (begun + 5, begun + 2, *([0] if not begun else [])):
            before = cache.read()
            tiers = go_back(subject, cache, tiers, length, f"with {name}")
            kept = len(tiers.tokens)
            pair(cache.read(), (before[0][:kept], before[1][:kept]), f"the first {kept} tokens with {name}, before and after")
            with raises("PositionOutOfRange"):
                cache.tier_of(length)


@check("EDIT-02", "tiered")
def no_more_tokens_stay_than_came(subject: Subject) -> None:
    cache, tiers = both(subject, max_tokens=7)
    for count in (3, 6, 4):  # nothing has moved on, some have, some are gone
        append(subject, cache, tiers, count)
        came = tiers.appended
        for length in subject.integers(came + 1, came + 20, -1, -came, -came - 1):
            with raises("PositionOutOfRange"):
                cache.truncate(length)
            agree(subject, cache, tiers, f"after truncate({length}) of {came} was refused")
        cache.truncate(came)
        agree(subject, cache, tiers, f"after truncate({came}) of {came}")


@check("EDIT-03", "tiered")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    """To where tokens move on, and out: the removed ones leave neither a scale nor a place behind."""
    for name, (cache, tiers) in every_form(subject):
        begun = tiers.appended
        for length, more in ((begun, 3), (begun + 2, 2), (begun + 5, 1)):  # of the last draft a token is taken
            draft(subject, cache, tiers, 2)
            tiers = go_back(subject, cache, tiers, length, f"with {name}")
            append(subject, cache, tiers, more)
            agree(subject, cache, tiers, f"with {name}, {more} tokens after truncate({length})")
        for count in (4, 1, 6, 1, 1, 9):
            append(subject, cache, tiers, count)
            agree(subject, cache, tiers, f"with {name}, {tiers.appended} tokens in all, some of which went before")
        never = made(subject, "tiered", **cache.config)
        for keys, values in tiers.given():
            never.append(keys[None], values[None])
        pair(cache.read(), never.read(), f"a cache with {name}, against one that never had what went")
        equal(dict(cache.stats()), dict(never.stats()), f"statistics with {name}, against a cache that never had what went")


@check("EDIT-03", "tiered")
def policies_that_changed_before_stay_changed(subject: Subject) -> None:
    cache, tiers = both(subject, tail_length=9, warm_length=2)
    begun = tiers.appended
    append(subject, cache, tiers, 3)
    cache.update_policy(tail_length=8, warm_length=1)
    tiers.update_policy(tail_length=8, warm_length=1)
    if tiers.moved_at > begun:
        raise NotOffered("a shorter tail that has room for what is there")
    draft(subject, cache, tiers, 2)
    tiers = go_back(subject, cache, tiers, begun + 3, "after a shorter tail was asked for")
    for count in (5, 1, 2, 6):
        append(subject, cache, tiers, count)
        agree(subject, cache, tiers, f"with a tail that was made shorter, {tiers.appended} tokens in all")


@check("EDIT-06", "tiered")
def what_has_moved_on_comes_back_or_says_so(subject: Subject) -> None:
    for tail, warm, most in ((4, 0, 20), (3, 2, 20), (0, 3, 20), (4, 0, 7), (6, 0, 6)):
        for fewer in (1, 3, 8):
            cache, tiers = both(subject, tail_length=tail, warm_length=warm, max_tokens=most)
            begun = tiers.appended
            append(subject, cache, tiers, 9)
            when = f"with a tail of {tail}, a warm tier of {warm} and at most {most} tokens, {tiers.appended} of them"
            length = max(begun, tiers.appended - fewer)
            if refuses(cache, length):
                agree(subject, cache, tiers, f"{when}, after truncate({length}) was refused")
            else:
                tiers = tiers.before(length)
                agree(subject, cache, tiers, f"{when}, after truncate({length})")
            append(subject, cache, tiers, 2)
            agree(subject, cache, tiers, f"{when}, and 2 more")


def refuses(cache: Handle, length: int) -> bool:
    """Whether it says that it cannot go back so far."""
    went = False
    with may_raise("NotTruncatable"):
        cache.truncate(length)
        went = True
    return not went


@check("EDIT-06", "tiered")
def what_nothing_has_moved_on_for_can_go(subject: Subject) -> None:
    """Older tokens lie in the store; those that go came to a tail that had room for them."""
    cache, tiers = both(subject, tail_length=2)
    append(subject, cache, tiers, 5)
    cache.update_policy(tail_length=6)
    tiers.update_policy(tail_length=6)
    came = tiers.appended
    room = 6 - tiers.count("tail")
    true(room > 1, "room in a longer tail", "for 2 tokens", room)
    append(subject, cache, tiers, 2)
    tiers = go_back(subject, cache, tiers, came + 1, "with a tail that was made longer")
    tiers = go_back(subject, cache, tiers, came, "with a tail that was made longer")
    append(subject, cache, tiers, 7)
    agree(subject, cache, tiers, "with a tail that was made longer, and 7 more")


@check("EDIT-06", "tiered")
def an_empty_cache_can_stay_empty(subject: Subject) -> None:
    cache = new(subject, "tiered")
    cache.truncate(0)
    equal(cache.total_tokens, 0, "tokens of a new cache after truncate(0)")
    keys, values = pair_of_tokens(subject, 2)
    cache.append(keys, values)
    cache.truncate(0)
    equal(cache.total_tokens, 0, "tokens after truncate(0) of 2")
    same(cache.read()[0], keys[:0], "tokens after truncate(0) of 2")
