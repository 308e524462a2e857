"""The base class of the state machines.

A machine creates objects and makes random calls. After each call it reads all observables of all objects. Each reply is compared
with the model's prediction, and a wrong reply is added to the `Search`.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.findings import Search
from kvref_conformance.fuzz.row_generators import RowSource
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import supports
from kvref_conformance.traces.checked_session import CheckedSession


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

    def make_object(self, **config: Any) -> None:
        """Create an object of the family whose observables are read after each call from now on.

        Does nothing if the factory raises a correct error or the family is not offered.
        """
        if (made := self.make_other(self.family, **config)) is not None:
            self.objects.append(made.id)
            self._look(made.id)

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
        """Make a call, then read all observables. Returns the same as `call_quietly`."""
        result = self.call_quietly(name, on, **args)
        for number in reversed(self.objects if self.going and on is not None else []):  # buffers before their pool
            self._look(number)
        return result

    @precondition(lambda self: not self.objects)
    @rule()
    def nothing_to_call(self) -> None:
        """Do nothing. Hypothesis needs a rule that is enabled even if no object could be created."""

    def teardown(self) -> None:
        self.search.through = sorted({*self.search.through, *self.subject.derivations_used.values()})
        if len(self.subject.call_trace) > len(self.search.longest) and not self.search.findings:
            self.search.longest = self.subject.call_trace

    def _look(self, number: int) -> None:
        model = self.models[number]
        for name, args in model.observations():
            with self.subject.quiet_reads():
                self._call(f"{model.family}.{name}", number, args)

    def _call(self, op: str, on: int | None, args: dict[str, Any]) -> Any:
        try:
            return self.calls.call(op, on, args)
        except NotOffered:
            return None
        except ClauseViolation as violation:
            self.search.add_failure(violation, self.subject.call_trace)
            raise Violation.for_clause(violation.clause) from None


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
