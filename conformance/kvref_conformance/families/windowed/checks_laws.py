"""Checks of LAW-05, LAW-12, LAW-20 and ATTN-07 with inputs that are specific to the windowed cache."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.checking.attending import even, queries
from kvref_conformance.checking.expect import equal, may_raise, raises, shaped, true
from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens, refused
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.windowed.checks import Run


@check("LAW-12a", "windowed")
def a_window_has_a_token(subject: Subject) -> None:
    for wrong in ({"window": 0}, {"window": -1}, {"sinks": -1}, {"rollback": -1}, {"chunk": -1}):
        if subject.integers(*wrong.values()):
            refused(subject, "windowed", **wrong)


@check("LAW-05ab", "windowed")
def nothing_is_seen_of_what_was_forgotten(subject: Subject) -> None:
    """Clears a cache with a full ring, with and without sinks."""
    for sinks in (0, 2):
        run = Run(subject, sinks=sinks)
        run.append(subject.size("tokens", 2 * run.config["window"]))
        run.cache.clear()
        run.gone(0)
        equal(run.cache.length, 0, "length after clear")
        with raises("PositionOutOfRange"):
            run.cache.read([0])
        for count in (1, 1, subject.size("tokens", run.config["window"])):
            run.append(count)
            run.holds("after clear")


@check("LAW-20", "windowed")
def positions_are_read_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 150)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("windowed", window=100, sinks=0, chunk=0)
        for part in (slice(0, 75), slice(75, 150)):
            yield "append of 75 tokens", typed.call(cache, "append", keys[part], values[part])
        yield "length of 150 tokens", cache.length
        yield "positions 60, 127, 128 and 149", typed.call(cache, "read", [60, 127, 128, 149])
        yield "truncate(150)", typed.call(cache, "truncate", 150)
        yield "position 129", typed.call(cache, "read", [129])

    the_same_in_any_type(subject, script)


@check("ATTN-07b", "windowed")
def what_left_the_window_has_no_effect(subject: Subject) -> None:
    """Appends a NaN or infinite token, if the cache accepts it, and steps with queries after it has left the window.

    The queries are so much later that even a window one token too long does not include it.
    """
    for rollback in (0, 3):  # with rollback the token may still be stored
        for value in (np.nan, np.inf):
            run = Run(subject, rollback=rollback)
            while len(run) < run.config["sinks"]:  # every query sees the sinks
                run.append(subject.size("tokens", 1))
            keys, values = (np.full_like(part, value) for part in pair_of_tokens(subject, 1))
            with may_raise("NonFinite"):
                run.cache.append(keys, values)
            run.append(run.config["window"] + 1)
            for count in (1, subject.size("tokens", 3), 1):
                query, what = queries(subject, count), f"attention after a token of {value} left the window"
                out = shaped(run.cache.step(query, *pair_of_tokens(subject, count), even(subject)), query.shape, what)
                true(bool(np.isfinite(out).all()), what, "finite", out)
