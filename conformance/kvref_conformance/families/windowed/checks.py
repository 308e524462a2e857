"""Checks of WIN-01 to 05 and 07: which positions each query sees, for tokens appended in steps of any size."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import seen
from kvref_conformance.oracle.formats import IN_GROUPS, ROTATED, dim_of, group_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.token_storage import tokens_as
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.testlib.assertions import (
    LOUD_SCALE,
    assert_equal,
    assert_pair,
    assert_within,
    default_scale,
    expected_attention,
    looking_at,
    loud_at_ends,
    may_raise,
    normal,
    queries,
    raises,
    reads,
    shaped,
    true,
)
from kvref_conformance.testlib.fixtures import (
    at_least,
    formats_of,
    new,
    one_of_each_kind,
    pair_of_tokens,
    random_tokens,
    refused,
    round_to_input_dtype,
    supports,
)
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.production_sizes import affordable
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import VALUES, WrittenContent, belongs, content, pair_of_content

# Tokens per step for a window of 7: fewer than the window, as many, and more; while it fills, when it is full, and later.
PORTIONS = ((1,) * 9, (3, 2, 4, 1), (7, 1, 1), (20, 1), (1, 19, 2), (6, 1, 1, 8), (2, 0, 9))
TOGETHER = ({"chunk": 4, "sinks": 2}, {"chunk": 7, "window": 3}, {"chunk": 3, "window": 7}, {"chunk": 4, "window": 3, "sinks": 1})
SOME = 24  # at most this many queries of a long step are compared


class WindowedFixture:
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
        got = shaped(self.cache.step(query, keys, values, default_scale(self.subject)), query.shape, f"attention {when}")
        begin = len(self)
        self.came(keys, values)
        rows = [*range(count)][:: -(-count // SOME) or 1]
        self.saw(got[rows], query[rows], [begin + row for row in rows], when)

    def saw(self, got: NDArray, query: NDArray, at: list[int], when: str) -> None:
        """Raises Broken unless `got` is the attention of queries at the positions `at` over the tokens that they see."""
        views = [self.seen(position) for position in at]
        want, bound = expected_attention(
            self.subject, query, self.keys, self.values, scale=default_scale(self.subject), views=views
        )
        try:
            assert_within(got, want, bound, f"attention of {len(query)} queries {when}")
        except Broken as broken:
            raise self._explained(broken, got, query, list(at)) from None

    def _explained(self, broken: Broken, got: NDArray, query: NDArray, at: list[int]) -> Broken:
        """Returns a Broken with the wrong query and the positions that it attended over, or `broken` if no known view matches."""
        for row, position in enumerate(at):
            one, own = query[row : row + 1], self.seen(position)
            for name, view in self._views(position):
                want, bound = expected_attention(
                    self.subject, one, self.keys, self.values, scale=default_scale(self.subject), views=[view]
                )
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
        assert_equal(self.cache.length, len(self), f"length {when}")
        needed = self.needed()
        assert_pair(
            self.cache.read(needed), (self.keys[needed], self.values[needed]), f"positions {shown(np.array(needed))} {when}"
        )


def shown(positions: NDArray) -> str:
    """Formats positions as runs of consecutive numbers: "0, 2, 14 .. 20"."""
    if not len(positions):
        return "nothing"
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in runs)


def scaled_steps(subject: Subject, run: WindowedFixture, counts: tuple[int, ...]) -> Iterator[tuple[int, str]]:
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
        run = WindowedFixture(subject, window=window)
        for count, when in scaled_steps(subject, run, (1,) * 9):
            run.step(count, when)


@check("WIN-01", "windowed")
def a_window_that_is_longer_than_what_came_is_none(subject: Subject) -> None:
    run = WindowedFixture(subject, window=24)
    for count, when in scaled_steps(subject, run, (1, 5, 3)):
        run.step(count, when)
    query = queries(subject, 1)
    run.saw(
        shaped(run.cache.attend(query, default_scale(subject)), query.shape, "attention"),
        query,
        [len(run) - 1],
        "over all appended tokens",
    )


@check("WIN-02a", "windowed")
def each_query_of_a_step_has_its_own_view(subject: Subject) -> None:
    for counts in PORTIONS:
        run = WindowedFixture(subject)
        for count, when in scaled_steps(subject, run, counts):
            run.step(count, when)


@check("WIN-02b", "windowed")
def pieces_leave_what_the_whole_leaves(subject: Subject) -> None:
    for counts in PORTIONS:
        whole, pieces = WindowedFixture(subject), WindowedFixture(subject)
        sizes = [size for size, _ in scaled_steps(subject, whole, counts)]
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
            run = WindowedFixture(subject, sinks=sinks)
            for count, when in scaled_steps(subject, run, counts):
                run.append(count)
                run.holds(f"{when} with {run.config['sinks']} sinks")


@check("WIN-03a", "windowed")
def positions_are_read_in_the_order_they_are_asked_for(subject: Subject) -> None:
    for sinks in (0, 2):
        run = WindowedFixture(subject, sinks=sinks)
        for count, when in scaled_steps(subject, run, (9, 1, 3)):
            run.append(count)
            needed = run.needed()
            for asked in (needed[::-1], needed[-1:] + needed[:1] + needed[-1:]):
                assert_pair(run.cache.read(asked), (run.keys[asked], run.values[asked]), f"positions {asked} {when}")


@check("WIN-03bc", "windowed")
def what_was_dropped_is_not_somebody_elses(subject: Subject) -> None:
    run = WindowedFixture(subject)
    for count, when in scaled_steps(subject, run, (9, 1, 1, 8, 2)):
        run.append(count)
        for position in range(len(run)):
            with may_raise("PositionOutOfRange"):
                got = run.cache.read([position])
                assert_pair(got, (run.keys[[position]], run.values[[position]]), f"position {position} {when}")
        for position in subject.integers(len(run), -1, -len(run)):
            with raises("PositionOutOfRange"):
                run.cache.read([position])


@check("WIN-04", "windowed")
def no_more_is_stored_than_the_window_needs(subject: Subject) -> None:
    for changes in ({}, {"sinks": 2}, {"rollback": 3}):
        run = WindowedFixture(subject, **changes)
        for count, when in scaled_steps(subject, run, (1, 5, 3, 1, 1, 9, 1, 1, 1)):
            run.append(count)
            most = sum(run.config[name] for name in ("window", "sinks", "rollback")) + run.longest
            least, stored = len(run.needed()), run.cache.stored_tokens
            true(least <= stored <= most, f"stored_tokens {when}", f"at least {least} and at most {most}", stored)


@check("WIN-05ab", "windowed")
def sinks_stay_for_ever(subject: Subject) -> None:
    for sinks in (2, 1, 4):
        for counts in ((1,) * 12, (3, 9, 1), (1, 20, 1), (20, 5)):
            run = WindowedFixture(subject, sinks=sinks)
            at_least(run.cache, sinks=1)
            for count, when in scaled_steps(subject, run, counts):
                run.step(count, f"{when} with {run.config['sinks']} sinks")
                run.holds(f"{when} with {run.config['sinks']} sinks")


@check("WIN-05abc", "windowed")
def tokens_are_stored_whatever_sinks_there_are(subject: Subject) -> None:
    """Tests as many sinks as the window has tokens, more, and none."""
    for sinks, window in ((7, 7), (9, 3), (0, 1), (5, 1)):
        run = WindowedFixture(subject, sinks=sinks, window=window)
        for count, when in scaled_steps(subject, run, (1,) * 12):
            run.step(count, f"{when} with {run.config['sinks']} sinks")
        run.holds(f"with {run.config['sinks']} sinks and a window of {run.config['window']}")


@check("WIN-07", "windowed")
def a_query_sees_its_own_chunk(subject: Subject) -> None:
    for chunk in (4, 1, 7):
        if not (supports(subject, "chunk", chunk) and supports(subject, "window", chunk)):
            chunk = subject.size("chunk", chunk)
        if not chunk:
            raise NotOffered(f"chunks, where its limits say {subject.limits.of('windowed', 'chunk')}")
        for counts in ((1,) * 10, (3, 2, 6), (13, 1), (4, 4, 1), (2, 9)):
            run = WindowedFixture(subject, window=chunk, chunk=chunk)
            at_least(run.cache, chunk=1)
            if run.config["window"] != run.config["chunk"]:
                raise NotOffered("a window and a chunk of the same length, where its limits do not allow both")
            for count, when in scaled_steps(subject, run, counts):
                run.step(count, f"{when}, in chunks of {run.config['chunk']}")


@check("WIN-07", "windowed")
def a_chunk_has_sinks_before_it_and_a_window_within(subject: Subject) -> None:
    """Combines a chunk with a different window or with sinks.

    No known model has such a combination, but an implementation that accepts the sizes must not ignore one of them.
    """
    lacking = list[NotOffered]()
    for sizes in TOGETHER:
        try:
            run = WindowedFixture(subject, **sizes)
            at_least(run.cache, **dict.fromkeys(sizes, 1))
        except NotOffered as missing:
            lacking.append(missing)
            continue
        for count, when in scaled_steps(subject, run, (1, 1, 1, 1, 1, 3, 9, 1, 2)):
            run.step(count, f"{when}, in chunks of {run.config['chunk']}, with {run.config['sinks']} sinks")
    if len(lacking) == len(TOGETHER):
        raise lacking[0]


# Checks of WIN-06 and EDIT-02: `truncate`, which may raise NotTruncatable where needed tokens were evicted.


def goes_back(run: WindowedFixture, length: int) -> bool:
    """Truncates. Returns False if the cache raises NotTruncatable."""
    with may_raise("NotTruncatable"):
        run.truncate(length)
        return True
    return False


@check("WIN-06ac", "windowed")
def tokens_go_before_any_left_the_window(subject: Subject) -> None:
    for sinks in (0, 2):
        run = WindowedFixture(subject, window=9, sinks=sinks)
        most = run.config["window"] - 1
        run.step(subject.size("tokens", most), "in a step that leaves room for one token in the window")
        while len(run) < most:
            run.step(1, "in a step that leaves room for one token in the window")
        for length in (most - 1, most - 3, 1, 0):
            run.truncate(length)
            run.holds(f"after truncate({length}), before the window was full")
        run.step(subject.size("tokens", 4), "in a step of tokens that replace truncated ones")


@check("WIN-06bc", "windowed")
def a_draft_goes_back(subject: Subject) -> None:
    """Truncates drafts of up to `rollback` tokens at every phase of the ring."""
    subject.need(rollback=1)
    for rollback in (3, 1):
        for drafted in range(1, subject.size("rollback", rollback) + 1):
            run = WindowedFixture(subject, rollback=rollback)
            drafted = subject.size("tokens", drafted)
            run.step(subject.size("tokens", run.config["window"] - 2), "in a step before the first draft")
            for time in range(2 * (run.config["window"] + run.config["rollback"]) if run.config["window"] < 32 else 5):
                length, when = len(run), f"in a step that replaces draft {time + 1} of {drafted} tokens"
                run.step(drafted, f"in the step of draft {time + 1} of {drafted} tokens")
                run.truncate(length)
                run.holds(f"after draft {time + 1} of {drafted} tokens was truncated")
                run.step(1, when)


@check("WIN-06cd", "windowed")
def what_is_gone_does_not_come_back_as_something_else(subject: Subject) -> None:
    for rollback in (0, 3):
        for sinks in (0, 2):
            for wanted in (-1, -2, -5, -8, -12, sinks, sinks + 1):  # negative: from the end; others: long before the window
                run = WindowedFixture(subject, rollback=rollback, sinks=sinks)
                run.append(subject.size("tokens", run.config["window"] + 6))
                run.append(subject.size("tokens", 5))
                length = wanted if wanted >= 0 else max(0, len(run) + wanted)
                if length > len(run):
                    continue
                when = f"truncate({length}) of {len(run)} with a window of {run.config['window']}"
                if goes_back(run, length):
                    run.holds(f"after {when}")
                    run.step(subject.size("tokens", 2), f"after {when}")
                else:
                    run.holds(f"after {when} raised NotTruncatable")
                    run.step(1, f"after {when} raised NotTruncatable")


@check("WIN-06e", "windowed")
def attending_where_others_went_is_right_or_refused(subject: Subject) -> None:
    for rollback, back in ((0, 1), (3, 2), (3, 4)):  # back = rollback + 1: a token that the newest token sees is evicted
        run = WindowedFixture(subject, rollback=rollback)
        run.append(subject.size("tokens", run.config["window"] + 6))
        run.append(subject.size("tokens", 5))
        if len(run) > back and goes_back(run, len(run) - back):
            query = queries(subject, 2)
            with may_raise("PositionOutOfRange"):
                got = shaped(
                    run.cache.attend(query, default_scale(subject)),
                    query.shape,
                    f"attention after truncate removed {back} tokens",
                )
                run.saw(got, query, [len(run) - 1] * 2, f"after truncate removed {back} tokens")


@check("WIN-06bc", "windowed")
def tokens_that_went_leave_no_place_behind(subject: Subject) -> None:
    """Appends and truncates drafts of one token while the ring is full. The stored tokens are as if there had been no drafts."""
    subject.need(rollback=1)
    never, run = WindowedFixture(subject, rollback=1), WindowedFixture(subject, rollback=1)
    for time in range(3 * run.config["window"] if run.config["window"] < 32 else 8):
        run.step(1, f"in a step of one token after {len(run)}, between drafts that are truncated")
        run.append(1)
        run.truncate(len(run) - 1)
        run.holds(f"after {time + 1} drafts of one token were truncated")
    never.cache.append(run.keys, run.values)
    never.keys, never.values = run.keys, run.values
    never.holds("in a cache without drafts")


@check("EDIT-02ab", "windowed")
def no_more_tokens_stay_than_came(subject: Subject) -> None:
    run = WindowedFixture(subject)
    for count in (3, 9):
        run.append(subject.size("tokens", count))
        came = len(run)
        for length in subject.integers(came + 1, came + 20, -1, -came):
            with raises("PositionOutOfRange"):
                run.cache.truncate(length)
            run.holds(f"after truncate({length}) of {came} tokens raised PositionOutOfRange")
        run.cache.truncate(came)
        run.holds(f"after truncate({came}) of {came} tokens")
        assert_equal(run.cache.length, came, f"length after truncate({came})")


# Checks of WIN-10: windowed caches in any storage format; each token is quantized once.

LOUD = 2.0**6


class FormatRing:
    """A cache of one format, and the values that `read` has to return for every token that was appended."""

    def __init__(self, subject: Subject, format: str, **sizes: int) -> None:
        self.subject, self.cache = (
            subject,
            new(subject, "windowed", dtype=format, head_dim=dim_of(format), **{"window": 5} | sizes),
        )
        self.config, self.format = self.cache.config, format
        self.shape = self.config["num_kv_heads"], self.config["head_dim"]
        self.stored = tokens_as(np.zeros((0, *self.shape)), format), tokens_as(np.zeros((0, *self.shape)), format)

    def __len__(self) -> int:
        return len(self.stored[0].values)

    def given(self, count: int, loud: float = 1.0) -> tuple[NDArray, NDArray]:
        """Returns new keys and values, and records them as stored: the caller has to append them next."""
        keys, values = (
            round_to_input_dtype(self.subject, random_tokens(self.subject, count, *self.shape) * loud) for _ in range(2)
        )
        self.stored = joined(self.stored, (tokens_as(keys, self.format), tokens_as(values, self.format)))
        return keys, values

    def append(self, count: int, loud: float = 1.0) -> None:
        self.cache.append(*self.given(self.subject.size("tokens", count), loud))

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.stored = at(self.stored, slice(length))

    def seen(self, query: int) -> list[int]:
        return [int(each) for each in seen(query, self.config["window"], self.config["sinks"], self.config["chunk"])]

    def holds(self, when: str) -> tuple[NDArray, NDArray]:
        """Reads and returns every position that the next query sees. Raises Broken unless the values are as expected."""
        needed = [position for position in self.seen(len(self)) if position < len(self)]
        got: tuple[NDArray, NDArray] = tuple(self.cache.read(needed))
        reads(self.subject, got, at(self.stored, needed), f"{self.format} tokens {when}", self.format)
        return got


def joined(
    first: tuple[ExpectedReads, ExpectedReads], second: tuple[ExpectedReads, ExpectedReads]
) -> tuple[ExpectedReads, ExpectedReads]:
    keys, values = (ExpectedReads(*map(np.concatenate, zip(*parts, strict=True))) for parts in zip(first, second, strict=True))
    return keys, values


def at(stored: tuple[ExpectedReads, ExpectedReads], where: Any) -> tuple[ExpectedReads, ExpectedReads]:
    keys, values = (ExpectedReads(*(each[where] for each in part)) for part in stored)
    return keys, values


@check("WIN-10a", "windowed")
def a_ring_turns_over_in_any_format(subject: Subject) -> None:
    """Replaces quiet tokens by loud ones in the ring, and loud ones by quiet ones. The sinks do not change."""
    for name in one_of_each_kind(subject, "dtype"):
        ring = FormatRing(subject, name, sinks=2)
        window = ring.config["window"]
        for count, loud in ((3, 1.0), (window, LOUD), (1, 1 / LOUD), (2 * window, 1.0), (2, LOUD)):
            ring.append(count, loud)
            ring.holds(f"after {len(ring)} tokens in a window of {window}")


@check("WIN-10a", "windowed")
def a_draft_goes_with_its_scales(subject: Subject) -> None:
    subject.need(rollback=1)
    for name in one_of_each_kind(subject, "dtype"):
        ring = FormatRing(subject, name, rollback=3)
        ring.append(ring.config["window"] + 2)
        length, drafted = len(ring), subject.size("tokens", min(2, ring.config["rollback"]))
        ring.append(drafted, LOUD)
        ring.truncate(length)
        ring.holds(f"after a draft of {drafted} tokens was truncated")
        ring.append(drafted, 1 / LOUD)
        ring.holds(f"that replace a draft of {drafted} tokens")
        ring.cache.clear()
        ring.stored = at(ring.stored, slice(0))
        ring.append(2, LOUD)
        ring.holds("that were appended after clear")


@check("WIN-10b", "windowed")
def a_step_sees_what_is_read_afterwards(subject: Subject) -> None:
    """A step attends over the stored values, those of its own tokens included: the values that `read` returns afterwards.

    The comparison finds only differences that exceed the error bound of attention.
    """
    for name in one_of_each_kind(subject, "dtype"):
        ring = FormatRing(subject, name, window=7)
        heads, dim = ring.shape
        ring.append(3)
        for count in dict.fromkeys(subject.size("tokens", each) for each in (1, 4, 3)):
            if count >= ring.config["window"] or ring.config["chunk"]:
                raise NotOffered("steps of fewer tokens than the window without chunks, where its limits do not allow them")
            begin, before = len(ring), ring.holds("before a step")
            known = [position for position in ring.seen(begin) if position < begin] + [*range(begin, begin + count)]
            query, scale = normal(subject, count, heads * subject.size("group_size", 2), dim), 2.5 / dim
            got = shaped(ring.cache.step(query, *ring.given(count), scale), query.shape, f"attention of {count} {name} tokens")
            ring.holds(f"after a step of {count} tokens")
            new_ones = ring.cache.read([*range(begin, begin + count)])
            keys, values = (np.concatenate(both) for both in zip(before, new_ones, strict=True))
            views = [np.array([known.index(each) for each in ring.seen(position)]) for position in range(begin, begin + count)]
            want, bound = expected_attention(subject, query, keys, values, scale=scale, views=views, rotated=name in ROTATED)
            assert_within(
                got,
                want,
                bound,
                f"attention of {count} {name} tokens after {begin}, compared with attention over the values that read returns",
            )


@check("WIN-10c", "windowed")
def what_a_format_cannot_hold_leaves_nothing_behind(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        ring = FormatRing(subject, name)
        ring.append(ring.config["window"] + 1)
        heads, dim = ring.shape
        for wrong in (np.nan, -np.inf):
            bad, good = (
                round_to_input_dtype(subject, random_tokens(subject, subject.size("tokens", 2), heads, dim)) for _ in range(2)
            )
            bad[-1, -1, -1] = wrong
            for keys, values in ((bad, good), (good, bad)):
                with raises("NonFinite"):
                    ring.cache.append(keys, values)
                with raises("NonFinite"):
                    ring.cache.step(normal(subject, len(keys), heads, dim), keys, values, 1.0)
            assert_equal(ring.cache.length, len(ring), f"length after a token with {wrong} raised NonFinite in {name}")
            ring.holds(f"after a token with {wrong} raised NonFinite")


@check("WIN-10d", "windowed")
def a_head_dim_that_no_group_goes_into_is_refused(subject: Subject) -> None:
    tried = 0
    for name in formats_of(subject, "dtype", *IN_GROUPS)[::7]:
        config = new(subject, "windowed", dtype=name, head_dim=2 * group_of(name)).config
        for dim in (group_of(name) + 1, group_of(name) // 2):
            if supports(subject, "head_dim", dim):
                tried += 1
                with raises("ConfigError"):
                    subject.new("windowed", **config | {"head_dim": dim})
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")


# Checks of LAW-05, LAW-12, LAW-20 and ATTN-07 with inputs that are specific to the windowed cache.


@check("LAW-12a", "windowed")
def a_window_has_a_token(subject: Subject) -> None:
    for wrong in ({"window": 0}, {"window": -1}, {"sinks": -1}, {"rollback": -1}, {"chunk": -1}):
        if subject.integers(*wrong.values()):
            refused(subject, "windowed", **wrong)


@check("LAW-05ab", "windowed")
def nothing_is_seen_of_what_was_forgotten(subject: Subject) -> None:
    """Clears a cache with a full ring, with and without sinks."""
    for sinks in (0, 2):
        run = WindowedFixture(subject, sinks=sinks)
        run.append(subject.size("tokens", 2 * run.config["window"]))
        run.cache.clear()
        run.gone(0)
        assert_equal(run.cache.length, 0, "length after clear")
        with raises("PositionOutOfRange"):
            run.cache.read([0])
        for count in (1, 1, subject.size("tokens", run.config["window"])):
            run.append(count)
            run.holds("after clear")


@check("LAW-20", "windowed")
def positions_are_read_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 150)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
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
            run = WindowedFixture(subject, rollback=rollback)
            while len(run) < run.config["sinks"]:  # every query sees the sinks
                run.append(subject.size("tokens", 1))
            keys, values = (np.full_like(part, value) for part in pair_of_tokens(subject, 1))
            with may_raise("NonFinite"):
                run.cache.append(keys, values)
            run.append(run.config["window"] + 1)
            for count in (1, subject.size("tokens", 3), 1):
                query, what = queries(subject, count), f"attention after a token of {value} left the window"
                out = shaped(run.cache.step(query, *pair_of_tokens(subject, count), default_scale(subject)), query.shape, what)
                true(bool(np.isfinite(out).all()), what, "finite", out)


# Checks of MOVE-01: a loaded windowed cache continues at the saved position, not at position 0.


@check("MOVE-01ac", "windowed")
def positions_go_on_where_they_were(subject: Subject) -> None:
    for sinks in dict.fromkeys(subject.size("sinks", wanted) for wanted in (0, 2)):
        cache = new(subject, "windowed", sinks=sinks)
        sees = {name: cache.config[name] for name in ("window", "sinks", "chunk")}
        count = 2 * sees["window"] + sinks + cache.config["rollback"] + 1  # some tokens left the window, and the ring wrapped
        cache.append(*pair_of_tokens(subject, count))
        loaded = new(subject, "windowed", sinks=sinks)
        loaded.append(*pair_of_tokens(subject, 3))
        loaded.load(cache.save())
        for more in (0, 1, 3):
            keys, values = pair_of_tokens(subject, more)
            for each in (cache, loaded):
                each.append(keys, values)
            count += more
            when = f"of {count} tokens with {sinks} sinks, {more} of them appended after load"
            assert_equal(loaded.length, count, f"length {when}")
            held = [int(at) for at in seen(count, **sees) if at < count]
            assert_pair(loaded.read(held), cache.read(held), f"positions {held} {when}")
            if sinks < count - sees["window"] - cache.config["rollback"] - 3:
                with may_raise("PositionOutOfRange"):
                    got, want = loaded.read([sinks]), cache.read([sinks])
                    assert_pair(got, want, f"position {sinks} {when}, which no query sees any more")


@check("MOVE-01c", "windowed")
def what_a_query_sees_is_what_it_would_have_seen(subject: Subject) -> None:
    cache, loaded = new(subject, "windowed"), new(subject, "windowed")
    cache.append(*pair_of_tokens(subject, 2 * cache.config["window"] + 1))
    loaded.load(cache.save())
    keys, values = pair_of_tokens(subject, 1)
    query, length = queries(subject, 1), int(cache.length) + 1
    got = np.array(loaded.step(query, keys, values, default_scale(subject)))
    cache.append(keys, values)
    held = seen(length - 1, **{name: cache.config[name] for name in ("window", "sinks", "chunk")})
    want, bound = expected_attention(subject, query, *cache.read([int(at) for at in held]), scale=default_scale(subject))
    assert_within(got, want, bound, "attention of a step after load, over the tokens that the saved cache contains")


# Checks of LAW-18: windows of production sizes, which must not be a token too long or too short.

APPENDED = 400  # tokens; larger steps, up to the window's length, are appended without queries


@check("LAW-18", "windowed")
def a_ring_turns_over_many_times(subject: Subject) -> None:
    for window, sinks, rollback in ((512, 0, 0), (500, 4, 7), (128, 1, 0)):
        turning_over(subject, 1, 64, window, sinks, rollback, (1, 127, 129, 300, 511, 1, 1, 16, 600, 1))


@check("LAW-18", "windowed", real=True)
def a_ring_of_a_model_turns_over(subject: Subject) -> None:
    for window, sinks, rollback in ((4096, 0, 0), (4096, 4, 8), (1023, 128, 0)):
        turning_over(subject, 8, 128, window, sinks, rollback, (1, 127, 2048, 1919, 1, 1, 16, 4097, 1, 5000, 1))


def turning_over(
    subject: Subject, heads: int, dim: int, window: int, sinks: int, rollback: int, pieces: Sequence[int]
) -> None:  # fmt: skip
    cache = new(subject, "windowed", num_kv_heads=heads, head_dim=dim, window=window, sinks=sinks, rollback=rollback)
    config, at = cache.config, 0
    written = WrittenContent(config["num_kv_heads"], config["head_dim"])
    for count in (affordable(subject, each, len(pieces)) for each in pieces):
        cache.append(*pair_of_content(0, 0, range(at, at + count), written.heads, written.dim))
        at += count
        written.up_to(0, 0, at)
        holds(cache, at, written)
        if config["rollback"] and count > 1:
            cache.append(*pair_of_content(1, 0, range(at, at + config["rollback"]), written.heads, written.dim))
            written.up_to(1, 0, at + config["rollback"])
            cache.truncate(at)
            holds(cache, at, written)


def holds(cache: ObjectProxy, length: int, written: WrittenContent) -> None:
    """Raises Broken unless `read` returns every token that the next query sees."""
    assert_equal(cache.length, length, "length")
    needed = [int(at) for at in view(cache, length) if at < length]
    belongs(cache.read(needed), 0, 0, needed, written)


def view(cache: ObjectProxy, query: int) -> NDArray:
    return seen(query, *(cache.config[name] for name in ("window", "sinks", "chunk")))


@check("LAW-18", "windowed")
def windows_end_where_they_should(subject: Subject) -> None:
    for sizes in ({"window": 512}, {"window": 130, "sinks": 4}, {"window": 255, "chunk": 255}):
        ends_of_views(subject, 1, 64, sizes, (140, 350, 20, 1, 16, 700, 1, 1, 65))


@check("LAW-18", "windowed", real=True)
def windows_of_models_end_where_they_should(subject: Subject) -> None:
    for sizes in ({"window": 4096}, {"window": 1024, "sinks": 4}, {"window": 8192, "chunk": 8192}, {"window": 4095}):
        ends_of_views(subject, 2, 128, sizes, (3900, 300, 1, 1, 3900, 200, 64, 1, 1400, 33))


def ends_of_views(subject: Subject, heads: int, dim: int, sizes: dict[str, int], pieces: Sequence[int]) -> None:
    """Checks for some queries of each step that their views begin and end at the right positions."""
    cache = new(subject, "windowed", num_kv_heads=heads, head_dim=dim, **sizes)
    at_least(cache, **sizes)
    heads, dim, group = cache.config["num_kv_heads"], cache.config["head_dim"], subject.size("group_size", 2)
    steps = list(step_positions([affordable(subject, each, len(pieces)) for each in pieces]))
    chosen = [at for step in steps for at in looked_at(step)][:dim]
    views = {at: view(cache, at) for at in chosen}
    keys = loud_at_ends(steps[-1].stop, heads, dim, list(views.values()))
    values = content(0, 0, range(len(keys)), heads, dim, VALUES)
    for step in steps:
        given = keys[step.start : step.stop], values[step.start : step.stop]
        if APPENDED < len(step) <= cache.config["window"]:
            cache.append(*given)
            continue
        query = looking_at([chosen.index(at) if at in views else None for at in step], group * heads, dim)
        got = shaped(
            cache.step(query, *given, LOUD_SCALE), query.shape, f"attention of a step of {len(step)} tokens after {step.start}"
        )
        for at in (each for each in chosen if each in step):
            row = slice(at - step.start, at - step.start + 1)
            want, bound = expected_attention(subject, query[row], keys, values, scale=LOUD_SCALE, views=[views[at]])
            seen_there = f"attention of position {at} over {shown(views[at])}, in a step of {len(step)} tokens after {step.start}"
            assert_within(got[row], want, bound, seen_there)


def step_positions(sizes: Sequence[int]) -> Iterator[range]:
    """Yields the positions of each step."""
    at = 0
    for size in sizes:
        yield range(at, at + size)
        at += size


def looked_at(step: range) -> list[int]:
    """Returns the positions of the queries to check: at the ends of the step and of kernel tiles, and in the middle."""
    rows = {0, 1, 63, 64, 255, 256, len(step) // 2, len(step) - 2, len(step) - 1}
    return [step.start + row for row in sorted(rows) if 0 <= row < len(step)]
