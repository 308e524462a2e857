"""Checks of WIN: which positions each query sees, for tokens appended in steps of any size, and other clauses of this family."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families.windowed.model import Windowed
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import visible_positions
from kvref_conformance.oracle.formats import FORMATS_IN_GROUPS, ROTATED_FORMATS, dim_of, group_of
from kvref_conformance.testlib.assertions import (
    LOUD_SCALE,
    assert_equal,
    assert_pair,
    assert_reads,
    assert_shape,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    keys_loud_at_view_ends,
    may_raise,
    normal_rows,
    one_hot_queries,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import (
    assert_config_error,
    new_object,
    one_format_per_kind,
    random_pair,
    random_tokens,
    require_sizes,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import VALUES, WrittenContent, assert_content, content_pair, token_content

# Tokens per step for a window of 7: fewer than the window, as many, and more; while it fills, when it is full, and later.
PORTIONS = ((1,) * 9, (3, 2, 4, 1), (7, 1, 1), (20, 1), (1, 19, 2), (6, 1, 1, 8), (2, 0, 9))
TOGETHER = ({"chunk": 4, "sinks": 2}, {"chunk": 7, "window": 3}, {"chunk": 3, "window": 7}, {"chunk": 4, "window": 3, "sinks": 1})


class WindowedFixture(Session):
    """A cache to which random tokens are appended."""

    model: Windowed

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **changes)
        self.config = self.cache.config

    def __len__(self) -> int:
        return len(self.model.tokens)

    def random(self, count: int, factor: float = 1.0) -> tuple[NDArray, NDArray]:
        keys, values = (
            round_to_input_dtype(self.subject, random_tokens(self.subject, count, *self.model.row) * factor) for _ in range(2)
        )
        return keys, values

    def query(self, count: int) -> tuple[NDArray, float]:
        """Returns `count` random queries, and the scale of their scores."""
        heads, dim = self.model.row
        return normal_rows(self.subject, count, heads * self.subject.size("group_size", 2), dim), 2.5 / dim

    def append(self, count: int, factor: float = 1.0) -> None:
        """Appends the allowed number of tokens that is nearest to `count`."""
        self.cache.append(*self.random(self.subject.size("tokens", count), factor))

    def append_up_to(self, length: int) -> None:
        """Appends until the cache has at least `length` tokens, in as few calls as the limits allow."""
        while len(self) < length:
            self.append(length - len(self))

    def step(self, count: int) -> None:
        """Steps with the allowed number of tokens that is nearest to `count`."""
        count = self.subject.size("tokens", count)
        query, scale = self.query(count)
        with self.explaining():
            self.cache.step(query, *self.random(count), scale)

    def attend(self, count: int) -> None:
        with self.explaining():
            self.cache.attend(*self.query(count))

    def truncates(self, length: int) -> bool:
        """Truncates. Returns False if the cache raises NotTruncatable."""
        with may_raise("NotTruncatable"):
            self.cache.truncate(length)
            return True
        return False

    def read_each(self) -> None:
        """Reads every position by itself. A position that the next query does not see may be evicted."""
        for position in range(len(self)):
            with may_raise("PositionOutOfRange"):
                self.cache.read([position])

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """If the attention of a query is wrong, names the query and the positions that it attended over."""
        try:
            yield
        except ClauseViolation as violation:
            raise self._explained(violation) from None

    def _explained(self, violation: ClauseViolation) -> ClauseViolation:
        """Returns `violation` itself if no known view matches the last reply."""
        exchange = self.subject.call_trace[-1]
        args, got = exchange.request.args, exchange.reply.ok if exchange.reply else None
        if not isinstance(got, np.ndarray) or got.shape != args["query"].shape:
            return violation
        appended = self.model.as_tokens(args["keys"], args["values"]) if "keys" in args else []
        tokens = [*self.model.tokens, *appended]
        positions = [*range(len(self), len(tokens))] or [len(self) - 1] * len(got)
        keys, values = (part.values for part in self.model.stack(tokens))
        for row, position in enumerate(positions):
            for name, view in self._views(position, len(tokens)):
                query = args["query"][row : row + 1]
                want, bound = expected_attention(self.subject, query, keys, values, scale=args["scale"], views=[view])
                if (np.abs(got[row] - want[0]) <= bound[0]).all():
                    if not name:
                        break
                    wanted = f"the attention over positions {shown(self.model.seen(position))}"
                    return ClauseViolation(
                        f"the query at position {position}", wanted, f"the attention over positions {shown(view)} ({name})"
                    )
            else:
                return violation
        return violation

    def _views(self, position: int, count: int) -> Iterator[tuple[str, NDArray]]:
        """Yields names and positions: first the correct view, without a name, then the views of known bugs."""
        sizes: dict[str, Any] = {name: self.config[name] for name in ("window", "sinks", "chunk")}
        window, sinks = self.model.window, self.model.sinks
        yield "", self.model.seen(position)
        for name, changed in (
            ("the window is one token too long", {"window": window + 1}),
            ("the window is one token too short", {"window": window - 1}),
            ("the sinks are missing", {"sinks": 0}), ("there is one sink too many", {"sinks": sinks + 1}),
            ("the window is not applied", {"window": None}), ("the chunks are not applied", {"chunk": 0}),
        ):  # fmt: skip
            yield name, visible_positions(position, **sizes | changed)
        yield "later tokens are included", np.arange(max(0, position - window + 1), count)


def shown(positions: NDArray) -> str:
    """Formats positions as runs of consecutive numbers: "0, 2, 14 .. 20"."""
    if not len(positions):
        return "nothing"
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in runs)


def scaled_steps(session: WindowedFixture, counts: tuple[int, ...]) -> list[int]:
    """Returns the size of each step, scaled from a window of 7 tokens to the window of the session."""
    window = session.model.window
    scaled = [count if count == 1 or window <= 7 else count * window // 7 for count in counts]
    if {*counts} == {1}:
        scaled[0] = max(1, window - 3)  # so that single tokens are appended just before and just after the window is full
    return [session.subject.size("tokens", each) for each in scaled]


def assert_views_by_definition(subject: Subject, **sizes: int) -> None:
    """Steps over a cache of these sizes, and compares with attention over positions that are listed here, without the model."""
    session = WindowedFixture(subject, **sizes)
    require_sizes(session.cache, **dict.fromkeys(sizes, 1))
    window, sinks, chunk = (session.config[name] for name in ("window", "sinks", "chunk"))

    def is_visible(past: int, position: int) -> bool:
        in_window = position - past < window and (not chunk or past // chunk == position // chunk)
        return past < sinks or in_window

    counts = scaled_steps(session, (1, 3, 1, 6, 1, 9, 2))
    (keys, values), (query, scale) = session.random(sum(counts)), session.query(sum(counts))
    for start, count in zip(np.cumsum([0, *counts]), counts, strict=False):
        stop = start + count
        got = session.cache.step(query[start:stop], keys[start:stop], values[start:stop], scale)
        views = [np.array([past for past in range(at + 1) if is_visible(past, at)]) for at in range(start, stop)]
        want, bound = expected_attention(subject, query[start:stop], keys[:stop], values[:stop], scale=scale, views=views)
        assert_within(got, want, bound, f"attention of the queries at positions {start} to {stop - 1}")
    if not chunk:
        last = [past for past in range(stop) if past < sinks or stop - past < window]
        assert_pair(session.cache.read(last), (keys[last], values[last]), "the tokens that the next query sees")


@check("WIN-02a", "windowed")
@check("WIN-01", "windowed")
def step_attends_over_the_last_positions(subject: Subject) -> None:
    assert_views_by_definition(subject)


@check("WIN-05ab", "windowed")
def step_attends_over_the_first_and_the_last_positions(subject: Subject) -> None:
    assert_views_by_definition(subject, sinks=2)


@check("WIN-07", "windowed")
def step_attends_over_positions_of_its_chunk(subject: Subject) -> None:
    assert_views_by_definition(subject, chunk=4, window=4)


@check("WIN-03a", "windowed")
def read_returns_the_appended_tokens(subject: Subject) -> None:
    assert_views_by_definition(subject)


@check("WIN-01", "windowed")
def step_attends_over_the_window(subject: Subject) -> None:
    for window in dict.fromkeys(subject.size("window", each) for each in (7, 1, 2, 4)):
        session = WindowedFixture(subject, window=window)
        for count in scaled_steps(session, (1,) * 9):
            session.step(count)


@check("WIN-01", "windowed")
def attend_in_a_long_window_uses_all_tokens(subject: Subject) -> None:
    session = WindowedFixture(subject, window=24)
    for count in (1, 5, 3):
        session.step(count)
    session.attend(1)


@check("WIN-02a", "windowed")
def step_attends_over_the_view_of_each_query(subject: Subject) -> None:
    for counts in PORTIONS:
        session = WindowedFixture(subject)
        for count in scaled_steps(session, counts):
            session.step(count)


@check("WIN-02b", "windowed")
def append_in_parts_equals_one_append(subject: Subject) -> None:
    for counts in PORTIONS:
        whole, parts = WindowedFixture(subject), WindowedFixture(subject)
        sizes = scaled_steps(whole, counts)
        keys, values = whole.random(sum(sizes))
        whole.cache.append(keys, values)
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            parts.cache.append(keys[start : start + size], values[start : start + size])
        whole.look()
        parts.look()


@check("WIN-03a", "windowed")
def read_returns_what_the_next_query_sees(subject: Subject) -> None:
    for sinks in (0, 2):
        for counts in PORTIONS:
            session = WindowedFixture(subject, sinks=sinks)
            for count in scaled_steps(session, counts):
                session.append(count)
                session.look()


@check("WIN-03a", "windowed")
def read_returns_positions_in_the_order_of_its_argument(subject: Subject) -> None:
    for sinks in (0, 2):
        session = WindowedFixture(subject, sinks=sinks)
        for count in scaled_steps(session, (9, 1, 3)):
            session.append(count)
            needed = session.model.needed()
            keys, values = session.cache.read(needed)
            for order in ([*range(len(needed))][::-1], [-1, 0, -1] if needed else []):
                positions = [needed[each] for each in order]
                assert_pair(session.cache.read(positions), (keys[order], values[order]), f"positions {positions}")


@check("WIN-03bc", "windowed")
def read_of_an_evicted_position_returns_its_token_or_raises(subject: Subject) -> None:
    session = WindowedFixture(subject)
    for count in scaled_steps(session, (9, 1, 1, 8, 2)):
        session.append(count)
        for position in range(len(session)):
            for positions in ([position], [len(session) - 1, position], [position, len(session) - 1]):
                with may_raise("PositionOutOfRange"):
                    session.cache.read(positions)
        for position in subject.integers(len(session), -1, -len(session)):
            with raises("PositionOutOfRange"):
                session.cache.read([position])


@check("WIN-03bc", "windowed")
def read_after_a_draft_returns_the_tokens_or_raises(subject: Subject) -> None:
    """Appends fewer tokens than a draft had, at every phase of the ring: the other slots of the draft belong to no position."""
    subject.require_size(rollback=2)
    session = WindowedFixture(subject, rollback=3)
    session.append(session.model.window + 4)
    for _ in range(session.model.window + session.model.rollback if session.model.window < 32 else 5):
        before = len(session)
        session.append(session.model.rollback)
        if session.truncates(before):
            session.read_each()
        session.append(1)
        session.read_each()


@check("WIN-04", "windowed")
def stored_tokens_is_at_most_what_the_window_needs(subject: Subject) -> None:
    for changes in ({}, {"sinks": 2}, {"rollback": 3}):
        session, longest = WindowedFixture(subject, **changes), 0
        for count in scaled_steps(session, (1, 5, 3, 1, 1, 9, 1, 1, 1)):
            session.append(count)
            longest = max(longest, count)
            most = sum(session.config[name] for name in ("window", "sinks", "rollback")) + longest
            least, stored = len(session.model.needed()), session.cache.stored_tokens
            assert_true(least <= stored <= most, "stored_tokens", f"at least {least} and at most {most}", stored)


@check("WIN-05ab", "windowed")
def step_attends_over_the_sinks(subject: Subject) -> None:
    for sinks in (2, 1, 4):
        for counts in ((1,) * 12, (3, 9, 1), (1, 20, 1), (20, 5)):
            session = WindowedFixture(subject, sinks=sinks)
            require_sizes(session.cache, sinks=1)
            for count in scaled_steps(session, counts):
                session.step(count)
                session.look()


@check("WIN-05abc", "windowed")
def step_with_any_number_of_sinks_stores_its_tokens(subject: Subject) -> None:
    """Tests as many sinks as the window has tokens, more, and none."""
    for sinks, window in ((7, 7), (9, 3), (0, 1), (5, 1)):
        session = WindowedFixture(subject, sinks=sinks, window=window)
        for count in scaled_steps(session, (1,) * 12):
            session.step(count)
        session.look()


@check("WIN-07", "windowed")
def step_attends_over_the_chunk(subject: Subject) -> None:
    for chunk in (4, 1, 7):
        if not (supports(subject, "chunk", chunk) and supports(subject, "window", chunk)):
            chunk = subject.size("chunk", chunk)
        if not chunk:
            raise NotOffered(f"chunks, where its limits say {subject.limits.limit('windowed', 'chunk')}")
        for counts in ((1,) * 10, (3, 2, 6), (13, 1), (4, 4, 1), (2, 9)):
            session = WindowedFixture(subject, window=chunk, chunk=chunk)
            require_sizes(session.cache, chunk=1)
            if session.model.window != session.model.chunk:
                raise NotOffered("a window and a chunk of the same length, where its limits do not allow both")
            for count in scaled_steps(session, counts):
                session.step(count)


@check("WIN-07", "windowed")
def step_combines_chunk_window_and_sinks(subject: Subject) -> None:
    """Combines a chunk with a different window or with sinks.

    No known model has such a combination, but an implementation that accepts the sizes must not ignore one of them.
    """
    lacking = list[NotOffered]()
    for sizes in TOGETHER:
        try:
            session = WindowedFixture(subject, **sizes)
            require_sizes(session.cache, **dict.fromkeys(sizes, 1))
        except NotOffered as missing:
            lacking.append(missing)
            continue
        for count in scaled_steps(session, (1, 1, 1, 1, 1, 3, 9, 1, 2)):
            session.step(count)
    if len(lacking) == len(TOGETHER):
        raise lacking[0]


# Checks of WIN-06 and EDIT-02: `truncate`, which may raise NotTruncatable where needed tokens were evicted.


@check("WIN-06ac", "windowed")
def truncate_before_the_window_is_full_succeeds(subject: Subject) -> None:
    for sinks in (0, 2):
        session = WindowedFixture(subject, window=9, sinks=sinks)
        most = session.model.window - 1
        session.step(most)
        while len(session) < most:
            session.step(1)
        for length in (most - 1, most - 3, 1, 0):
            session.cache.truncate(length)
            session.look()
        session.step(4)


@check("WIN-06bc", "windowed")
def truncate_removes_a_draft(subject: Subject) -> None:
    """Truncates drafts of up to `rollback` tokens at every phase of the ring."""
    subject.require_size(rollback=1)
    for rollback in (3, 1):
        for draft in range(1, subject.size("rollback", rollback) + 1):
            session = WindowedFixture(subject, rollback=rollback)
            window = session.model.window
            session.step(window - 2)
            for _ in range(2 * (window + session.model.rollback) if window < 32 else 5):
                length = len(session)
                session.step(draft)
                session.cache.truncate(length)
                session.look()
                session.step(1)


@check("WIN-06cd", "windowed")
def truncate_past_evicted_tokens_succeeds_or_changes_nothing(subject: Subject) -> None:
    for rollback in (0, 3):
        for sinks in (0, 2):
            for wanted in (-1, -2, -5, -8, -12, sinks, sinks + 1):  # negative: from the end; others: long before the window
                session = WindowedFixture(subject, rollback=rollback, sinks=sinks)
                session.append(session.model.window + 6)
                session.append(5)
                length = wanted if wanted >= 0 else max(0, len(session) + wanted)
                if length <= len(session):
                    truncated = session.truncates(length)
                    session.look()
                    session.step(2 if truncated else 1)


@check("WIN-06e", "windowed")
def attend_after_truncate_is_correct_or_raises(subject: Subject) -> None:
    """back = rollback + 1: a token that the newest token sees is evicted. Some truncations end where a chunk begins."""
    for chunk, rollback, back in product((0, 3), (0, 3), (1, 2, 3, 4)):
        if back > rollback + 1 or (chunk and not supports(subject, "chunk", chunk)):
            continue
        session = WindowedFixture(subject, rollback=rollback, chunk=chunk)
        session.append(session.model.window + 6)
        session.append(5)
        if len(session) > back and session.truncates(len(session) - back):
            with may_raise("PositionOutOfRange"):
                session.attend(2)


@check("WIN-06bc", "windowed")
def truncate_of_drafts_keeps_a_full_ring(subject: Subject) -> None:
    """Appends and truncates drafts of one token while the ring is full."""
    subject.require_size(rollback=1)
    session = WindowedFixture(subject, rollback=1)
    for _ in range(3 * session.model.window if session.model.window < 32 else 8):
        session.step(1)
        session.append(1)
        session.cache.truncate(len(session) - 1)
        session.look()


@check("EDIT-02ab", "windowed")
def truncate_past_the_end_of_a_full_window_raises(subject: Subject) -> None:
    session = WindowedFixture(subject)
    for count in (3, 9):
        session.append(count)
        came = len(session)
        for length in subject.integers(came + 1, came + 20, -1, -came):
            with raises("PositionOutOfRange"):
                session.cache.truncate(length)
            session.look()
        session.cache.truncate(came)
        session.look()
        assert_equal(session.cache.length, came, f"length after truncate({came})")


# Checks of WIN-10: windowed caches in any storage format; each token is quantized once.

LOUD = 2.0**6


def caches_in_formats(subject: Subject, **sizes: int) -> Iterator[WindowedFixture]:
    """Yields a cache of one format of each kind."""
    for name in one_format_per_kind(subject, "dtype"):
        yield WindowedFixture(subject, dtype=name, head_dim=dim_of(name), **{"window": 5} | sizes)


def assert_reads_as(session: WindowedFixture) -> None:
    """Raises ClauseViolation unless every position that the next query sees reads as the format stores it."""
    session.look("length")
    needed, format = session.model.needed(), session.model.dtype
    keys, values = session.model.stack([session.model.tokens[position] for position in needed])
    assert_reads(session.subject, session.cache.read(needed), (keys, values), f"positions {needed}", format)


@check("WIN-10a", "windowed")
def append_replaces_tokens_and_their_scales(subject: Subject) -> None:
    """Replaces quiet tokens by loud ones in the ring, and loud ones by quiet ones. The sinks do not change."""
    for session in caches_in_formats(subject, sinks=2):
        window = session.model.window
        for count, factor in ((3, 1.0), (window, LOUD), (1, 1 / LOUD), (2 * window, 1.0), (2, LOUD)):
            session.append(count, factor)
            assert_reads_as(session)


@check("WIN-10a", "windowed")
def truncate_removes_the_scales_of_a_draft(subject: Subject) -> None:
    subject.require_size(rollback=1)
    for session in caches_in_formats(subject, rollback=3):
        session.append(session.model.window + 2)
        length, draft = len(session), min(2, session.model.rollback)
        session.append(draft, LOUD)
        session.cache.truncate(length)
        assert_reads_as(session)
        session.append(draft, 1 / LOUD)
        assert_reads_as(session)
        session.cache.clear()
        session.append(2, LOUD)
        assert_reads_as(session)


@check("WIN-10b", "windowed")
def step_uses_the_values_that_read_returns(subject: Subject) -> None:
    """A step attends over the stored values, those of its own tokens included: the values that `read` returns afterwards.

    The comparison finds only differences that exceed the error bound of attention.
    """
    for session in caches_in_formats(subject, window=7):
        cache, model = session.cache, session.model
        session.append(3)
        for count in dict.fromkeys(subject.size("tokens", each) for each in (1, 4, 3)):
            if count >= model.window or model.chunk:
                raise NotOffered("steps of fewer tokens than the window without chunks, where its limits do not allow them")
            old, new_positions = model.needed(), [*range(len(session), len(session) + count)]
            before, positions = cache.read(old), [*old, *new_positions]
            query, scale = session.query(count)
            got = assert_shape(cache.step(query, *session.random(count), scale), query.shape, f"attention of {count} tokens")
            assert_reads_as(session)
            keys, values = (np.concatenate(both) for both in zip(before, cache.read(new_positions), strict=True))
            views = [np.array([positions.index(each) for each in model.seen(position)]) for position in new_positions]
            rotated = model.dtype in ROTATED_FORMATS
            want, bound = expected_attention(subject, query, keys, values, scale=scale, views=views, rotated=rotated)
            assert_within(got, want, bound, f"attention of {count} {model.dtype} tokens over the values that read returns")


@check("WIN-10c", "windowed")
def append_of_non_finite_tokens_changes_nothing(subject: Subject) -> None:
    for session in caches_in_formats(subject):
        session.append(session.model.window + 1)
        for wrong in (np.nan, -np.inf):
            bad, good = session.random(subject.size("tokens", 2))
            bad[-1, -1, -1] = wrong
            query = normal_rows(subject, len(bad), *session.model.row)
            for keys, values in ((bad, good), (good, bad)):
                with raises("NonFinite"):
                    session.cache.append(keys, values)
                with raises("NonFinite"):
                    session.cache.step(query, keys, values, 1.0)
            assert_reads_as(session)


@check("WIN-10d", "windowed")
def new_with_a_head_dim_that_is_no_multiple_of_the_group_raises(subject: Subject) -> None:
    tried = 0
    for name in supported_formats(subject, "dtype", *FORMATS_IN_GROUPS)[::7]:
        config = new_object(subject, "windowed", dtype=name, head_dim=2 * group_of(name)).config
        for dim in (group_of(name) + 1, group_of(name) // 2):
            if supports(subject, "head_dim", dim):
                tried += 1
                with raises("ConfigError"):
                    subject.new("windowed", **config | {"head_dim": dim})
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")


# Checks of LAW-05, LAW-12, LAW-20 and ATTN-07 with inputs that are specific to the windowed cache.


@check("LAW-12a", "windowed")
def new_with_a_wrong_window_raises(subject: Subject) -> None:
    for wrong in ({"window": 0}, {"window": -1}, {"sinks": -1}, {"rollback": -1}, {"chunk": -1}):
        if subject.integers(*wrong.values()):
            assert_config_error(subject, "windowed", **wrong)


@check("LAW-05ab", "windowed")
def clear_makes_all_tokens_unreadable(subject: Subject) -> None:
    """Clears a cache with a full ring, with and without sinks."""
    for sinks in (0, 2):
        session = WindowedFixture(subject, sinks=sinks)
        session.append(2 * session.model.window)
        session.cache.clear()
        assert_equal(session.cache.length, 0, "length after clear")
        with raises("PositionOutOfRange"):
            session.cache.read([0])
        for count in (1, 1, session.model.window):
            session.append(count)
            session.look()


@check("LAW-20", "windowed")
def read_accepts_every_integer_type(subject: Subject) -> None:
    keys, values = random_pair(subject, 150)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("windowed", window=100, sinks=0, chunk=0)
        for part in (slice(0, 75), slice(75, 150)):
            yield "append of 75 tokens", typed.call(cache, "append", keys[part], values[part])
        yield "length of 150 tokens", cache.length
        yield "positions 60, 127, 128 and 149", typed.call(cache, "read", [60, 127, 128, 149])
        yield "truncate(150)", typed.call(cache, "truncate", 150)
        yield "position 129", typed.call(cache, "read", [129])

    assert_same_for_integer_types(subject, script)


@check("ATTN-07b", "windowed")
def step_ignores_non_finite_tokens_outside_the_window(subject: Subject) -> None:
    """Appends a NaN or infinite token, if the cache accepts it, and steps with queries after it has left the window.

    The queries are so much later that even a window one token too long does not include it.
    """
    for rollback in (0, 3):  # with rollback the token may still be stored
        for value in (np.nan, np.inf):
            cache = new_object(subject, "windowed", rollback=rollback)
            if cache.config["sinks"]:  # every query sees the sinks
                cache.append(*random_pair(subject, cache.config["sinks"]))
            keys, values = (np.full_like(part, value) for part in random_pair(subject, 1))
            with may_raise("NonFinite"):
                cache.append(keys, values)
            cache.append(*random_pair(subject, cache.config["window"] + 1))
            for count in (1, subject.size("tokens", 3), 1):
                query, what = random_queries(subject, count), f"attention after a token of {value} left the window"
                out = assert_shape(cache.step(query, *random_pair(subject, count), default_scale(subject)), query.shape, what)
                assert_true(bool(np.isfinite(out).all()), what, "finite", out)


# Checks of MOVE-01: a loaded windowed cache continues at the saved position, not at position 0.


@check("MOVE-01ac", "windowed")
def load_continues_at_the_saved_position(subject: Subject) -> None:
    for sinks in dict.fromkeys(subject.size("sinks", wanted) for wanted in (0, 2)):
        cache = new_object(subject, "windowed", sinks=sinks)
        sees = {name: cache.config[name] for name in ("window", "sinks", "chunk")}
        count = 2 * sees["window"] + sinks + cache.config["rollback"] + 1  # some tokens left the window, and the ring wrapped
        cache.append(*random_pair(subject, count))
        loaded = new_object(subject, "windowed", sinks=sinks)
        loaded.append(*random_pair(subject, 3))
        loaded.load(cache.save())
        for more in (0, 1, 3):
            keys, values = random_pair(subject, more)
            for each in (cache, loaded):
                each.append(keys, values)
            count += more
            when = f"of {count} tokens with {sinks} sinks, {more} of them appended after load"
            assert_equal(loaded.length, count, f"length {when}")
            needed = [int(at) for at in visible_positions(count, **sees) if at < count]
            assert_pair(loaded.read(needed), cache.read(needed), f"positions {needed} {when}")
            if sinks < count - sees["window"] - cache.config["rollback"] - 3:
                with may_raise("PositionOutOfRange"):
                    got, want = loaded.read([sinks]), cache.read([sinks])
                    assert_pair(got, want, f"position {sinks} {when}, which no query sees any more")


@check("MOVE-01ac", "windowed")
def load_after_a_draft_restores_what_is_stored(subject: Subject) -> None:
    """A truncated draft has overwritten the oldest tokens of the ring, which the loaded cache does not contain either."""
    subject.require_size(rollback=1)
    for draft, more in ((3, 0), (3, 1), (1, 0)):
        session, loaded = WindowedFixture(subject, rollback=3), WindowedFixture(subject, rollback=3)
        draft = min(draft, session.model.rollback)
        session.append_up_to(session.model.window + 4)
        length = len(session)
        session.append_up_to(length + draft)
        if session.truncates(length):
            session.append(more)
            loaded.cache.load(session.cache.save())
            loaded.look()
            loaded.read_each()
            if len(loaded) > 2 and loaded.truncates(len(loaded) - 2):
                loaded.look()


@check("MOVE-01c", "windowed")
def step_after_load_attends_over_the_saved_tokens(subject: Subject) -> None:
    cache, loaded = new_object(subject, "windowed"), new_object(subject, "windowed")
    cache.append(*random_pair(subject, 2 * cache.config["window"] + 1))
    loaded.load(cache.save())
    keys, values = random_pair(subject, 1)
    query, length = random_queries(subject, 1), int(cache.length) + 1
    got = np.array(loaded.step(query, keys, values, default_scale(subject)))
    cache.append(keys, values)
    needed = visible_positions(length - 1, **{name: cache.config[name] for name in ("window", "sinks", "chunk")})
    want, bound = expected_attention(subject, query, *cache.read([int(at) for at in needed]), scale=default_scale(subject))
    assert_within(got, want, bound, "attention of a step after load, over the tokens that the saved cache contains")


# Checks of LAW-18: windows of production sizes, which must not be a token too long or too short.

APPENDED = 400  # tokens; larger steps, up to the window's length, are appended without queries


@check("LAW-18", "windowed")
def append_overwrites_a_ring_many_times(subject: Subject) -> None:
    for window, sinks, rollback in ((512, 0, 0), (500, 4, 7), (128, 1, 0)):
        overwrite_ring(subject, 1, 64, window, sinks, rollback, (1, 127, 129, 300, 511, 1, 1, 16, 600, 1))


@check("LAW-18", "windowed", real=True)
def append_overwrites_a_ring_of_production_size(subject: Subject) -> None:
    for window, sinks, rollback in ((4096, 0, 0), (4096, 4, 8), (1023, 128, 0)):
        overwrite_ring(subject, 8, 128, window, sinks, rollback, (1, 127, 2048, 1919, 1, 1, 16, 4097, 1, 5000, 1))


def overwrite_ring(
    subject: Subject, heads: int, dim: int, window: int, sinks: int, rollback: int, pieces: Sequence[int]
) -> None:  # fmt: skip
    cache = new_object(subject, "windowed", num_kv_heads=heads, head_dim=dim, window=window, sinks=sinks, rollback=rollback)
    config, at = cache.config, 0
    written = WrittenContent(config["num_kv_heads"], config["head_dim"])
    for count in (affordable_tokens(subject, each, len(pieces)) for each in pieces):
        cache.append(*content_pair(0, 0, range(at, at + count), written.heads, written.dim))
        at += count
        written.add_up_to(0, 0, at)
        assert_cache_contains(cache, at, written)
        if config["rollback"] and count > 1:
            cache.append(*content_pair(1, 0, range(at, at + config["rollback"]), written.heads, written.dim))
            written.add_up_to(1, 0, at + config["rollback"])
            cache.truncate(at)
            assert_cache_contains(cache, at, written)


def assert_cache_contains(cache: ObjectProxy, length: int, written: WrittenContent) -> None:
    """Raises ClauseViolation unless `read` returns every token that the next query sees."""
    assert_equal(cache.length, length, "length")
    needed = [int(at) for at in view(cache, length) if at < length]
    assert_content(cache.read(needed), 0, 0, needed, written)


def view(cache: ObjectProxy, query: int) -> NDArray:
    return visible_positions(query, *(cache.config[name] for name in ("window", "sinks", "chunk")))


@check("LAW-18", "windowed")
def step_attends_up_to_the_ends_of_a_window(subject: Subject) -> None:
    for sizes in ({"window": 512}, {"window": 130, "sinks": 4}, {"window": 255, "chunk": 255}):
        check_ends_of_views(subject, 1, 64, sizes, (140, 350, 20, 1, 16, 700, 1, 1, 65))


@check("LAW-18", "windowed", real=True)
def step_attends_up_to_the_ends_of_a_window_of_production_size(subject: Subject) -> None:
    for sizes in ({"window": 4096}, {"window": 1024, "sinks": 4}, {"window": 8192, "chunk": 8192}, {"window": 4095}):
        check_ends_of_views(subject, 2, 128, sizes, (3900, 300, 1, 1, 3900, 200, 64, 1, 1400, 33))


def check_ends_of_views(subject: Subject, heads: int, dim: int, sizes: dict[str, int], pieces: Sequence[int]) -> None:
    """Checks for some queries of each step that their views begin and end at the right positions."""
    cache = new_object(subject, "windowed", num_kv_heads=heads, head_dim=dim, **sizes)
    require_sizes(cache, **sizes)
    heads, dim, group = cache.config["num_kv_heads"], cache.config["head_dim"], subject.size("group_size", 2)
    steps = list(step_positions([affordable_tokens(subject, each, len(pieces)) for each in pieces]))
    chosen = [at for step in steps for at in compared_positions(step)][:dim]
    views = {at: view(cache, at) for at in chosen}
    keys = keys_loud_at_view_ends(steps[-1].stop, heads, dim, list(views.values()))
    values = token_content(0, 0, range(len(keys)), heads, dim, VALUES)
    for step in steps:
        rows = keys[step.start : step.stop], values[step.start : step.stop]
        if APPENDED < len(step) <= cache.config["window"]:
            cache.append(*rows)
            continue
        query = one_hot_queries([chosen.index(at) if at in views else None for at in step], group * heads, dim)
        got = assert_shape(
            cache.step(query, *rows, LOUD_SCALE), query.shape, f"attention of a step of {len(step)} tokens after {step.start}"
        )
        for at in (each for each in chosen if each in step):
            row = slice(at - step.start, at - step.start + 1)
            want, bound = expected_attention(subject, query[row], keys, values, scale=LOUD_SCALE, views=[views[at]])
            what = f"attention of position {at} over {shown(views[at])}, in a step of {len(step)} tokens after {step.start}"
            assert_within(got[row], want, bound, what)


def step_positions(sizes: Sequence[int]) -> Iterator[range]:
    """Yields the positions of each step."""
    at = 0
    for size in sizes:
        yield range(at, at + size)
        at += size


def compared_positions(step: range) -> list[int]:
    """Returns the positions of the queries to check: at the ends of the step and of kernel tiles, and in the middle."""
    rows = {0, 1, 63, 64, 255, 256, len(step) // 2, len(step) - 2, len(step) - 1}
    return [step.start + row for row in sorted(rows) if 0 <= row < len(step)]
