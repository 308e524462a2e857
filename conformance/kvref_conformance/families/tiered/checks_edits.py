"""EDIT-01 to EDIT-03: truncation of the tiered cache."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.tiered.fixture import TieredFixture, need_support, tail_dtype
from kvref_conformance.oracle.formats import AFFINE, PLAIN, SYMMETRIC
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import formats_of
from kvref_conformance.testlib.registry import check

LOUD = 2.0**8
ROOM = 9


def forms(subject: Subject) -> Iterator[dict[str, Any]]:
    """A policy of each form (TIER-15), for every format that its newest tokens may have."""
    for dtype in formats_of(subject, "tail_dtype", *PLAIN):
        yield {"tail_dtype": dtype, "tail_length": ROOM, "warm_length": 2}
    yield {"tail_length": 20, "tail_dtype": tail_dtype(subject)}
    for name in formats_of(subject, "store_format", *AFFINE, *SYMMETRIC):
        yield {"tail_length": 0, "store_format": name}
    for name in formats_of(subject, "warm_format", *AFFINE, *SYMMETRIC):
        yield {"tail_length": 0, "warm_length": ROOM, "warm_format": name}


def every_form(subject: Subject) -> Iterator[TieredFixture]:
    """Caches to which ROOM tokens can be appended without migration. Raises NotOffered if no form has such a cache."""
    found = False
    for policy in forms(subject):
        with suppress(NotOffered):
            run = TieredFixture(subject, **policy)
            if run.room_left >= ROOM:
                yield run
                found = True
    if not found:
        raise NotOffered(f"room for {ROOM} tokens before one migrates")


@check("EDIT-01abc", "tiered")
def the_first_tokens_stay(subject: Subject) -> None:
    for run in every_form(subject):
        first = run.appended
        run.append(7)
        for length in (first + 5, first + 2, *([0] if not first else [])):
            before = run.cache.read()
            run.cache.truncate(length)
            count = min(length, run.config["max_tokens"])
            assert_equal(run.cache.total_tokens, count, f"number of tokens after truncate({length})")
            assert_pair(run.cache.read(), (before[0][:count], before[1][:count]), f"the first {count} tokens")
            with raises("PositionOutOfRange"):
                run.cache.tier_of(length)


@check("EDIT-02ab", "tiered")
def no_more_tokens_stay_than_came(subject: Subject) -> None:
    run = TieredFixture(subject, max_tokens=7)
    for count in (3, 6, 4):  # no token has migrated, then some have, then some are evicted
        run.append(count)
        for length in subject.integers(run.appended + 1, run.appended + 20, -1, -run.appended, -run.appended - 1):
            with raises("PositionOutOfRange"):
                run.cache.truncate(length)
            run.look()
        run.cache.truncate(run.appended)
        run.look()


@check("EDIT-03", "tiered")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    """Later tokens migrate and are evicted as if the removed tokens had left no scale and used no slot."""
    for run in every_form(subject):
        first = run.appended
        for length, more in ((first, 3), (first + 2, 2), (first + 5, 1)):  # the last truncate keeps one of the two draft tokens
            run.append(2, factor=LOUD)
            run.cache.truncate(length)
            run.look()
            run.append(more)
        run.append(4, 1, 6, 9)


@check("EDIT-03", "tiered")
def policies_that_changed_before_stay_changed(subject: Subject) -> None:
    run = TieredFixture(subject, tail_length=ROOM, warm_length=2)
    first = run.appended
    run.append(3)
    shorter = {name: run.config[name] - 1 for name in ("tail_length", "warm_length") if run.config[name]}
    need_support(subject, **shorter)
    run.cache.update_policy(**shorter)
    if run.model.tiers.moved_at > first or run.room_left < 2:
        raise NotOffered("a shorter tail with room for the stored tokens and 2 more")
    run.append(2, factor=LOUD)
    run.cache.truncate(first + 3)
    run.append(5, 1, 2, 6)
