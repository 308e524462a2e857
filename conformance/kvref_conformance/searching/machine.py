"""What every machine does: make objects, call them, look at everything after each call, and write down what was found."""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.setup import takes
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.conversation.trace.dialogue import Dialogue
from kvref_conformance.families import all_families
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.searching.found import Search
from kvref_conformance.searching.rows import Source


class Violation(AssertionError):
    """Told to Hypothesis: a class of its own for each clause, so that it shrinks each apart."""

    _kinds: ClassVar[dict[str, type["Violation"]]] = {}

    @classmethod
    def of(cls, clause: str) -> "Violation":
        return cls._kinds.setdefault(clause, type(f"Violation_{clause}", (cls,), {}))(clause)


class Machine(RuleBasedStateMachine):
    """`search` is set on a subclass made for one run. Objects are known by the number of the request that made them."""

    search: ClassVar[Search]
    family: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.going = self.search.begin()
        self.subject = Subject(self.search.implementation, np.random.default_rng(0), self.search.patience, self.family)
        self.subject.watchers += self.search.watchers
        self.dialogue = Dialogue(self.subject)
        self.witness = self.dialogue.witness
        self.source = Source(self.subject.limits.dtypes(self.family)[0])
        self.objects: list[int] = []  # that are looked at after each call
        self.config: dict[str, Any] = {}  # the sizes of what was made last, within the limits

    def make(self, **config: Any) -> None:
        """A new object of the family, looked at after each call from now on, unless it is refused or not offered."""
        if (made := self.another(self.family, **config)) is not None:
            self.objects.append(made.id)
            self._look(made.id)

    def another(self, family: str, **config: Any) -> Handle | None:
        """A new object of any family."""
        record = all_families()[family]
        config |= {name: self.format_for(family, name, value) for name, value in config.items() if name in record.formats}
        config |= self.subject.limits.sizes(record, config)
        if not self.going or None in config.values():
            return None
        self.config = config
        made = self._call(f"{family}.new", None, config)
        return made if isinstance(made, Handle) else None

    def format_for(self, family: str, name: str, wanted: str) -> str | None:
        """The format that is wanted of a size, or another that it has; None where it has none."""
        among = (wanted, *all_families()[family].formats[name])
        return next((each for each in among if takes(self.subject, name, each)), None)

    def acquired(self, num_bytes: int) -> None:
        """A buffer of the pool that was made first."""
        made = self.call("acquire", self.objects[0], num_bytes=num_bytes)
        if isinstance(made, Handle):
            self.objects.append(made.id)

    def ask(self, name: str, on: int | None, /, **args: Any) -> Any:
        """Make a call that only reads. Gives the result, or None where it raised as it had to."""
        if not self.going or on is None:
            return None
        return self._call(f"{self.witness.models[on].family}.{name}", on, args)

    def call(self, name: str, on: int | None, /, **args: Any) -> Any:
        """Make a call and look at everything, as `ask` does."""
        result = self.ask(name, on, **args)
        for number in reversed(self.objects if self.going and on is not None else []):  # a buffer before its pool
            self._look(number)
        return result

    @precondition(lambda self: not self.objects)
    @rule()
    def nothing_to_call(self) -> None:
        """Hypothesis needs a rule that applies, also where no object could be made."""

    def teardown(self) -> None:
        self.search.through = sorted({*self.search.through, *self.subject.through.values()})
        if len(self.subject.conversation) > len(self.search.longest) and not self.search.findings:
            self.search.longest = self.subject.conversation

    def _look(self, number: int) -> None:
        model = self.witness.models[number]
        for name, args in model.looks():
            with self.subject.looking():
                self._call(f"{model.family}.{name}", number, args)

    def _call(self, op: str, on: int | None, args: dict[str, Any]) -> Any:
        try:
            return self.dialogue.say(op, on, args)
        except NotOffered:
            return None
        except Broken as broken:
            self.search.found(broken, self.subject.conversation)
            raise Violation.of(broken.clause) from None


LAST = 9  # an index that stands for one there is not
ANY = st.sampled_from((*(0, 1, 2) * 6, LAST))  # rarely: a call that is wrong leaves nothing to be seen
COUNT = st.sampled_from((1, 2, 3, 4, 5, 1, 2, 3, 8, 0))  # tokens that come at once
BACK = st.sampled_from((1, 2, 3, 1, 2, 5, 0, -1))  # tokens that a truncate takes away; -1: to one more than there are


DAMAGE = st.sampled_from((0, 0, 0, 1, 2, 3, 4))  # of what is loaded: none; a bit in its header, its tensors, its end; its end


def damaged(data: NDArray, damage: int) -> NDArray:
    """What was saved, as a machine loads it."""
    if damage == 4:
        return data[:-1]
    changed = data.copy()
    if damage and len(data):
        changed[(9, len(data) * 2 // 3, len(data) - 1)[damage - 1] % len(data)] ^= 1
    return changed


def within(index: int, stop: int) -> int:
    """An index in [0, stop); for LAST, one past the end, and where there is none, -1."""
    return stop if index == LAST else index % stop if stop else -1


def pair(source: Source, shape: tuple[int, ...], kind: str) -> tuple[NDArray, NDArray]:
    return source.rows(shape, kind), source.rows(shape, kind)


def one_of(values: Iterable[int], index: int) -> int | None:
    """One of some numbers, by any index; None where there is none."""
    ordered = sorted(values)
    return ordered[index % len(ordered)] if ordered else None
