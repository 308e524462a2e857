"""The base class of the state machines.

A machine creates objects and makes random calls. After most calls it reads all observables of all objects; at times one to three
calls pass before it does, because a cache can defer work until something is read. Each reply is compared with the model's
prediction, and a wrong reply is added to the `Search`.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, repeat
from typing import Any, ClassVar, NoReturn

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import CallTimeout, ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.findings import Search
from kvref_conformance.fuzz.pair_coverage import changing_operations
from kvref_conformance.fuzz.row_generators import RowSource
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.model_runner import UnknownObject
from kvref_conformance.oracle.reference_model import TooManyStates
from kvref_conformance.testlib.fixtures import supports
from kvref_conformance.traces.checked_session import CheckedSession
from kvref_conformance.traces.shrinking import replay_requests

# Numbers of calls that pass before the machine reads, in order, and from the first again.
WHICH = st.integers(0, 5)
EDIT_SIZES = (1, 2, 3, 0, 5, 8, 20, 33)  # numbers of tokens of an edit
GAPS = st.lists(st.sampled_from((0, 0, 0, 0, 0, 1, 2, 3)), max_size=6)


class Violation(AssertionError):
    """Reports a failure to Hypothesis. Each clause has its own subclass, so that Hypothesis shrinks the clauses separately."""

    _kinds: ClassVar[dict[str, type["Violation"]]] = {}

    @classmethod
    def for_clause(cls, clause: str) -> "Violation":
        return cls._kinds.setdefault(clause, type(f"Violation_{clause}", (cls,), {}))(clause)


class FamilyStateMachine(RuleBasedStateMachine):
    """The base class. `search` is set on a subclass that is made for one run.

    Objects are identified by the id of the request that created them. `going` is false when the search has enough findings; then
    no calls are made.
    """

    search: ClassVar[Search]
    family: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.going = self.search.begin_sequence()
        self.subject = Subject(self.search.implementation, np.random.default_rng(0), self.search.patience, self.family)
        self.subject.watchers += self.search.watchers
        self.calls = CheckedSession(self.subject)
        self.models = self.calls.runner.models
        self.source = RowSource(self.subject.limits.dtypes(self.family)[0])
        self.objects: list[int] = []  # the objects whose observables are read after each call
        self.config: dict[str, Any] = {}  # the sizes of the object that was created last, within the limits
        self.gaps: Iterator[int] = repeat(0)
        self.calls_before_look = 0  # the number of calls that pass before the machine reads
        self.calls_since_look = 0
        self.skipped_looks = False  # whether a call of this sequence passed without a look after it
        self.in_a_row = False  # whether calls of `edit_in_a_row` are made, after which it reads once
        self.edited: Any = None  # the object or the sequence that they edit
        self.saved: Any = None  # its data, saved before them

    @initialize(gaps=GAPS)
    def choose_gaps(self, gaps: list[int]) -> None:
        self.gaps = cycle(gaps or [0])

    def make_object(self, **config: Any) -> None:
        """Create an object of the family whose observables are read after each call from now on.

        Does nothing if the factory raises a correct error or the family is not offered.
        """
        if (made := self.make_other(self.family, **config)) is not None:
            self.objects.append(made.id)
            self.look_at_all()

    def make_other(self, family: str, **config: Any) -> ObjectProxy | None:
        """Create an object of any family. Returns None if that is not possible."""
        record = all_families()[family]
        config |= {name: self.format_for(family, name, value) for name, value in config.items() if name in record.formats}
        config |= self.subject.limits.sizes(record, config)
        if not self.going or None in config.values():
            return None
        self.config = config
        made = self._call(f"{family}.new", None, config)
        return made if isinstance(made, ObjectProxy) else None

    def format_for(self, family: str, name: str, wanted: str) -> str | None:
        """The wanted value of a format argument if it is supported, or else another supported one, or None."""
        among = (wanted, *all_families()[family].formats[name])
        return next((each for each in among if supports(self.subject, name, each)), None)

    def acquire_buffer(self, num_bytes: int) -> None:
        """Acquire a buffer from the pool that was created first."""
        made = self.call("acquire", self.objects[0], num_bytes=num_bytes)
        if isinstance(made, ObjectProxy):
            self.objects.append(made.id)

    def call_quietly(self, name: str, on: int | None, /, **args: Any) -> Any:
        """Make a call that changes nothing. Returns the result, or None if it raised a correct error."""
        if not self.going or on is None:
            return None
        return self._call(f"{self.models[on].family}.{name}", on, args)

    def call(self, name: str, on: int | None, /, **args: Any) -> Any:
        """Make a call, then read all observables or let it pass. Returns the same as `call_quietly`."""
        result = self.call_quietly(name, on, **args)
        if self.going and on is not None:
            self.calls_since_look += 1
            passes = self.in_a_row or self.calls_since_look <= self.calls_before_look
            if not passes or any(self.models[each].must_be_read for each in self.objects):
                self.look_at_all()
                self.calls_before_look = next(self.gaps)
        return result

    def look_at_all(self) -> None:
        """Read all observables of all objects."""
        self.skipped_looks |= self.calls_since_look > 1
        self.calls_since_look = 0
        try:
            for number in reversed(self.objects):  # buffers before their pool
                self.calls.observe(number)
        except ClauseViolation as found:
            self._fail(found)
        except UnknownObject as unknown:
            self._stop(unknown)

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        """The operations that change something, each as a function that makes a call of it on `edited`, which this method sets.

        The functions have one argument, a number below 8 that selects their arguments, which are usually valid.
        """
        raise NotImplementedError

    def cache_edits(self, length: Callable[[], int]) -> dict[str, Callable[[int], Any]]:
        """The edits of a cache without sequences, besides those that append. length: returns the number of its tokens."""
        found: dict[str, Callable[[int], Any]] = {
            "truncate": lambda number: self.call("truncate", self.edited, length=max(0, length() - EDIT_SIZES[number])),
            "clear": lambda number: self.call("clear", self.edited),
            "load": lambda number: self.call("load", self.edited, data=self.saved),
        }
        return {name: edit for name, edit in found.items() if f"{self.family}.{name}" in changing_operations(self.family)}

    def save_before_edits(self) -> Any:
        """The data that a `load` among the edits loads."""
        return self.call_quietly("save", self.edited)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 7)), min_size=3, max_size=12))
    def edit_in_a_row(self, which: int, picks: list[tuple[int, int]]) -> None:
        """Make changing calls on one object or sequence, and read nothing between them."""
        edits = self.edits(which)
        self.make_edits(edits, [(list(edits)[pick % len(edits)], number) for pick, number in picks])

    def make_edits(self, edits: dict[str, Callable[[int], Any]], picks: Iterable[tuple[str, int]]) -> None:
        """Make edits, each with its number, and read nothing between them."""
        self.saved = self.save_before_edits() if "load" in dict(picks) else None
        self.in_a_row = True
        try:
            for name, number in picks:
                if self.going and (name != "load" or self.saved is not None):
                    edits[name](number)
        finally:
            self.in_a_row = False
        if self.going and self.calls_since_look:
            self.look_at_all()

    @precondition(lambda self: not self.objects)
    @rule()
    def nothing_to_call(self) -> None:
        """Do nothing. Hypothesis needs a rule that is enabled even if no object could be created."""

    def teardown(self) -> None:
        if self.calls_since_look and self.going:
            self.look_at_all()
        self.search.through = sorted({*self.search.through, *self.subject.derivations_used.values()})
        if len(self.subject.call_trace) > len(self.search.longest) and not self.search.findings:
            self.search.longest = self.subject.call_trace
        self.search.end_sequence(self.subject.call_trace)

    def _call(self, op: str, on: int | None, args: dict[str, Any]) -> Any:
        try:
            return self.calls.call(op, on, args)
        except NotOffered:
            return None
        except ClauseViolation as found:
            self._fail(found)
        except UnknownObject as unknown:
            self._stop(unknown)

    def _stop(self, unknown: UnknownObject) -> None:
        """End the call sequence if there are too many possible states. Raises all other errors."""
        if not isinstance(unknown.__cause__, TooManyStates):
            raise unknown
        self.going = False
        self.subject.call_trace[:] = [exchange for exchange in self.subject.call_trace if exchange.reply]

    def _fail(self, found: ClauseViolation) -> NoReturn:
        """Add a failure to the search, and end the call sequence."""
        self.going = False
        violation, call_trace = self._first_failure(found)
        self.search.add_failure(violation, call_trace)
        raise Violation.for_clause(violation.clause) from None

    def _first_failure(self, found: ClauseViolation) -> tuple[ClauseViolation, list[Exchange]]:
        """The failure that the same calls show if all is read after each of them, or else as early as possible.

        The model derives the clause from the last call, and after calls that passed unread that can be the wrong call.
        """
        call_trace = self.subject.call_trace
        if not (self.skipped_looks or self.calls_since_look > 1) or isinstance(found, CallTimeout):
            return found, call_trace
        calls = [at for at, exchange in enumerate(call_trace) if not exchange.quiet]
        last_look = max((at for at, exchange in enumerate(call_trace[: calls[-1]]) if exchange.quiet), default=0)
        prefixes = [[call_trace[at] for at in calls]] + [call_trace[: at + 1] for at in calls if at > last_look]
        for number, prefix in enumerate(prefixes):
            again = Subject(self.search.implementation, np.random.default_rng(0), self.search.patience, self.family)
            again.watchers += self.search.watchers
            requests = [exchange.request for exchange in prefix]
            after = range(len(requests)) if number == 0 else range(len(requests) - 1, len(requests))
            replayed = replay_requests(again, requests, observed=self.objects, observed_after=after)
            if replayed.violation is not None and replayed.violation.clause:
                return replayed.violation, replayed.call_trace
        return found, call_trace


LAST_INDEX = 9  # an index that stands for one that is out of range
ANY_INDEX = st.sampled_from((*(0, 1, 2) * 6, LAST_INDEX))  # invalid indices are rare, because a call that raises has no effect
TOKEN_COUNT = st.sampled_from((1, 2, 3, 4, 5, 1, 2, 3, 8, 0))  # tokens per append
TRUNCATION = st.sampled_from((1, 2, 3, 1, 2, 5, 0, -1))  # tokens that a truncate removes; -1: the new length is one too large


DAMAGE_KIND = st.sampled_from((0, 0, 0, 1, 2, 3, 4))  # see `damage_saved_data`


def damage_saved_data(data: NDArray, damage: int) -> NDArray:
    """Saved data to load: 0 intact; a flipped bit in 1 the header, 2 the tensors, 3 the last byte; 4 without the last byte."""
    if damage == 4:
        return data[:-1]
    changed = data.copy()
    if damage and len(data):
        changed[(9, len(data) * 2 // 3, len(data) - 1)[damage - 1] % len(data)] ^= 1
    return changed


def clip_index(index: int, stop: int) -> int:
    """Map any index to [0, stop); LAST_INDEX to `stop`, which is out of range; if stop is 0, to -1."""
    return stop if index == LAST_INDEX else index % stop if stop else -1


def make_pair(source: RowSource, shape: tuple[int, ...], kind: str) -> tuple[NDArray, NDArray]:
    """Keys and values of this shape and kind."""
    return source.rows(shape, kind), source.rows(shape, kind)


def choose_one(values: Iterable[int], index: int) -> int | None:
    """One of the values, chosen by any index; None if there are no values."""
    ordered = sorted(values)
    return ordered[index % len(ordered)] if ordered else None
