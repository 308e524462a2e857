"""Checks of WIN-01 to 05 and 07: which positions each query sees, for tokens appended in steps of any size."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import equal, may_raise, pair, raises, shaped, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new, pair_of_tokens, takes
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import seen
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.outcome import Broken, NotOffered

# Tokens per step for a window of 7: fewer than the window, as many, and more; while it fills, when it is full, and later.
PORTIONS = ((1,) * 9, (3, 2, 4, 1), (7, 1, 1), (20, 1), (1, 19, 2), (6, 1, 1, 8), (2, 0, 9))
TOGETHER = ({"chunk": 4, "sinks": 2}, {"chunk": 7, "window": 3}, {"chunk": 3, "window": 7}, {"chunk": 4, "window": 3, "sinks": 1})
SOME = 24  # at most this many queries of a long step are compared


class Run:
    """A cache, and every token that was appended to it and not truncated, as it is stored."""

    def __init__(self, subject: Subject, **changes: Any) -> None:
        self.subject, self.cache = subject, new(subject, "windowed", **changes)
        config = self.cache.config
        self.sees = {name: config[name] for name in ("window", "sinks", "chunk")}
        self.config, self.keys, self.values = config, *pair_of_tokens(subject, 0)
        self.longest = 0

    def __len__(self) -> int:
        return len(self.keys)

    def seen(self, query: int) -> NDArray:
        return seen(query, **self.sees)

    def append(self, count: int) -> None:
        keys, values = pair_of_tokens(self.subject, count)
        self.cache.append(keys, values)
        self.came(keys, values)

    def step(self, count: int, when: str) -> None:
        """Steps with `count` tokens. Raises Broken unless the output of their queries is correct."""
        keys, values = pair_of_tokens(self.subject, count)
        query = queries(self.subject, count)
        got = shaped(self.cache.step(query, keys, values, even(self.subject)), query.shape, f"attention {when}")
        begin = len(self)
        self.came(keys, values)
        rows = [*range(count)][:: -(-count // SOME) or 1]
        self.saw(got[rows], query[rows], [begin + row for row in rows], when)

    def saw(self, got: NDArray, query: NDArray, at: list[int], when: str) -> None:
        """Raises Broken unless `got` is the attention of queries at the positions `at` over the tokens that they see."""
        views = [self.seen(position) for position in at]
        want, bound = exact(self.subject, query, self.keys, self.values, scale=even(self.subject), views=views)
        try:
            within(got, want, bound, f"attention of {len(query)} queries {when}")
        except Broken as broken:
            raise self._explained(broken, got, query, list(at)) from None

    def _explained(self, broken: Broken, got: NDArray, query: NDArray, at: list[int]) -> Broken:
        """Returns a Broken with the wrong query and the positions that it attended over, or `broken` if no known view matches."""
        for row, position in enumerate(at):
            one, own = query[row : row + 1], self.seen(position)
            for name, view in self._views(position):
                want, bound = exact(self.subject, one, self.keys, self.values, scale=even(self.subject), views=[view])
                if (np.abs(got[row] - want[0]) <= bound[0]).all():
                    if not name:
                        break
                    saw = f"the attention over positions {shown(view)} ({name})"
                    return Broken(f"the query at position {position}", f"the attention over positions {shown(own)}", saw)
            else:
                return broken
        return broken

    def _views(self, position: int) -> Iterator[tuple[str, NDArray]]:
        """Yields names and positions: first the correct view, without a name, then the views of known bugs."""
        window, sinks = self.sees["window"], self.sees["sinks"]
        yield "", self.seen(position)
        for name, changed in (
            ("the window is one token too long", {"window": window + 1}),
            ("the window is one token too short", {"window": window - 1}),
            ("the sinks are missing", {"sinks": 0}), ("there is one sink too many", {"sinks": sinks + 1}),
            ("the window is not applied", {"window": None}), ("the chunks are not applied", {"chunk": 0}),
        ):  # fmt: skip
            yield name, seen(position, **self.sees | changed)
        yield "later tokens are included", np.arange(max(0, position - window + 1), len(self))

    def came(self, keys: NDArray, values: NDArray) -> None:
        stored = (round_to(part, self.config["dtype"]) for part in (keys, values))
        self.keys, self.values = (np.concatenate(both) for both in zip((self.keys, self.values), stored, strict=True))
        self.longest = max(self.longest, len(keys))

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.gone(length)

    def gone(self, length: int) -> None:
        self.keys, self.values = self.keys[:length], self.values[:length]

    def needed(self) -> list[int]:
        """The appended positions that the next query sees."""
        return [int(at) for at in self.seen(len(self)) if at < len(self)]

    def holds(self, when: str) -> None:
        """Raises Broken unless `read` returns every token that the next query sees."""
        equal(self.cache.length, len(self), f"length {when}")
        needed = self.needed()
        pair(self.cache.read(needed), (self.keys[needed], self.values[needed]), f"positions {shown(np.array(needed))} {when}")


def shown(positions: NDArray) -> str:
    """Formats positions as runs of consecutive numbers: "0, 2, 14 .. 20"."""
    if not len(positions):
        return "nothing"
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in runs)


def portions(subject: Subject, run: Run, counts: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    """Yields the size of each step, scaled from a window of 7 tokens to the window of `run`, and a description of the step."""
    window = run.config["window"]
    scaled = [count if count == 1 or window <= 7 else count * window // 7 for count in counts]
    if {*counts} == {1}:
        scaled[0] = max(1, window - 3)  # so that single tokens are appended just before and just after the window is full
    for size in (subject.size("tokens", each) for each in scaled):
        yield size, f"with a window of {window}, in a step of {size} tokens after {len(run)}"


@check("WIN-01", "windowed")
def a_query_sees_the_last_tokens_its_own_among_them(subject: Subject) -> None:
    for window in dict.fromkeys(subject.size("window", each) for each in (7, 1, 2, 4)):
        run = Run(subject, window=window)
        for count, when in portions(subject, run, (1,) * 9):
            run.step(count, when)


@check("WIN-01", "windowed")
def a_window_that_is_longer_than_what_came_is_none(subject: Subject) -> None:
    run = Run(subject, window=24)
    for count, when in portions(subject, run, (1, 5, 3)):
        run.step(count, when)
    query = queries(subject, 1)
    run.saw(
        shaped(run.cache.attend(query, even(subject)), query.shape, "attention"),
        query,
        [len(run) - 1],
        "over all appended tokens",
    )


@check("WIN-02a", "windowed")
def each_query_of_a_step_has_its_own_view(subject: Subject) -> None:
    for counts in PORTIONS:
        run = Run(subject)
        for count, when in portions(subject, run, counts):
            run.step(count, when)


@check("WIN-02b", "windowed")
def pieces_leave_what_the_whole_leaves(subject: Subject) -> None:
    for counts in PORTIONS:
        whole, pieces = Run(subject), Run(subject)
        sizes = [size for size, _ in portions(subject, whole, counts)]
        keys, values = pair_of_tokens(subject, sum(sizes))
        whole.cache.append(keys, values)
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            pieces.cache.append(keys[start : start + size], values[start : start + size])
        whole.came(keys, values)
        for cache, when in ((whole.cache, "appended in one call"), (pieces.cache, f"appended in chunks of {sizes}")):
            whole.cache = cache
            whole.holds(f"after {len(whole)} tokens {when}")


@check("WIN-03a", "windowed")
def what_the_next_query_sees_is_there(subject: Subject) -> None:
    for sinks in (0, 2):
        for counts in PORTIONS:
            run = Run(subject, sinks=sinks)
            for count, when in portions(subject, run, counts):
                run.append(count)
                run.holds(f"{when} with {run.config['sinks']} sinks")


@check("WIN-03a", "windowed")
def positions_are_read_in_the_order_they_are_asked_for(subject: Subject) -> None:
    for sinks in (0, 2):
        run = Run(subject, sinks=sinks)
        for count, when in portions(subject, run, (9, 1, 3)):
            run.append(count)
            needed = run.needed()
            for asked in (needed[::-1], needed[-1:] + needed[:1] + needed[-1:]):
                pair(run.cache.read(asked), (run.keys[asked], run.values[asked]), f"positions {asked} {when}")


@check("WIN-03bc", "windowed")
def what_was_dropped_is_not_somebody_elses(subject: Subject) -> None:
    run = Run(subject)
    for count, when in portions(subject, run, (9, 1, 1, 8, 2)):
        run.append(count)
        for position in range(len(run)):
            with may_raise("PositionOutOfRange"):
                got = run.cache.read([position])
                pair(got, (run.keys[[position]], run.values[[position]]), f"position {position} {when}")
        for position in subject.integers(len(run), -1, -len(run)):
            with raises("PositionOutOfRange"):
                run.cache.read([position])


@check("WIN-04", "windowed")
def no_more_is_stored_than_the_window_needs(subject: Subject) -> None:
    for changes in ({}, {"sinks": 2}, {"rollback": 3}):
        run = Run(subject, **changes)
        for count, when in portions(subject, run, (1, 5, 3, 1, 1, 9, 1, 1, 1)):
            run.append(count)
            most = sum(run.config[name] for name in ("window", "sinks", "rollback")) + run.longest
            least, stored = len(run.needed()), run.cache.stored_tokens
            true(least <= stored <= most, f"stored_tokens {when}", f"at least {least} and at most {most}", stored)


@check("WIN-05ab", "windowed")
def sinks_stay_for_ever(subject: Subject) -> None:
    for sinks in (2, 1, 4):
        for counts in ((1,) * 12, (3, 9, 1), (1, 20, 1), (20, 5)):
            run = Run(subject, sinks=sinks)
            at_least(run.cache, sinks=1)
            for count, when in portions(subject, run, counts):
                run.step(count, f"{when} with {run.config['sinks']} sinks")
                run.holds(f"{when} with {run.config['sinks']} sinks")


@check("WIN-05abc", "windowed")
def tokens_are_stored_whatever_sinks_there_are(subject: Subject) -> None:
    """Tests as many sinks as the window has tokens, more, and none."""
    for sinks, window in ((7, 7), (9, 3), (0, 1), (5, 1)):
        run = Run(subject, sinks=sinks, window=window)
        for count, when in portions(subject, run, (1,) * 12):
            run.step(count, f"{when} with {run.config['sinks']} sinks")
        run.holds(f"with {run.config['sinks']} sinks and a window of {run.config['window']}")


@check("WIN-07", "windowed")
def a_query_sees_its_own_chunk(subject: Subject) -> None:
    for chunk in (4, 1, 7):
        if not (takes(subject, "chunk", chunk) and takes(subject, "window", chunk)):
            chunk = subject.size("chunk", chunk)
        if not chunk:
            raise NotOffered(f"chunks, where its limits say {subject.limits.of('windowed', 'chunk')}")
        for counts in ((1,) * 10, (3, 2, 6), (13, 1), (4, 4, 1), (2, 9)):
            run = Run(subject, window=chunk, chunk=chunk)
            at_least(run.cache, chunk=1)
            if run.config["window"] != run.config["chunk"]:
                raise NotOffered("a window and a chunk of the same length, where its limits do not allow both")
            for count, when in portions(subject, run, counts):
                run.step(count, f"{when}, in chunks of {run.config['chunk']}")


@check("WIN-07", "windowed")
def a_chunk_has_sinks_before_it_and_a_window_within(subject: Subject) -> None:
    """Combines a chunk with a different window or with sinks.

    No known model has such a combination, but an implementation that accepts the sizes must not ignore one of them.
    """
    lacking = list[NotOffered]()
    for sizes in TOGETHER:
        try:
            run = Run(subject, **sizes)
            at_least(run.cache, **dict.fromkeys(sizes, 1))
        except NotOffered as missing:
            lacking.append(missing)
            continue
        for count, when in portions(subject, run, (1, 1, 1, 1, 1, 3, 9, 1, 2)):
            run.step(count, f"{when}, in chunks of {run.config['chunk']}, with {run.config['sinks']} sinks")
    if len(lacking) == len(TOGETHER):
        raise lacking[0]
