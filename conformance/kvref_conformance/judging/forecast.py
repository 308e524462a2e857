"""How far the checks go with what an implementation offers, and how much further with one operation more.

It is not asked: kvref's own caches are judged behind a door of the same operations, formats and limits. They are right, so that
what comes back is what can be judged at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvref_conformance.checking.registry import Check
from kvref_conformance.clauses import Clause
from kvref_conformance.conversation.drivers.stdio import OverStdio
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.judging.door import Door
from kvref_conformance.judging.judge import Failure, Judge
from kvref_conformance.judging.offered import Offered
from kvref_conformance.outcome import Outcome

Chosen = Mapping[Clause, Sequence[Check]]
LONG = "LAW-18"  # real sizes: its checks alone take as long as all others, which is too long to try them again and again


@dataclass
class Reach:
    """Of the checks of one clause in one family: how many there are, how many can judge, through what, and what others lack."""

    clause: str
    family: str
    checks: int = 0
    judged: int = 0
    through: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def how(self) -> str:
        """In a word or two."""
        if not self.judged:
            return "not offered"
        if self.judged < self.checks:
            return "in part"
        return "through others" if self.through else "directly"


@dataclass(frozen=True)
class Gain:
    """What one operation more would bring: checks that cannot judge without it, and their clauses."""

    operation: str
    checks: int
    clauses: list[str]


@dataclass(frozen=True)
class Forecast:
    reaches: list[Reach]
    gains: list[Gain]  # those that bring most first


def forecast(implementation: Any, surface: Mapping[str, Offered], chosen: Chosen) -> Forecast:
    """For the clauses that are chosen, of the families on the surface.

    Of the checks that somebody wrote alone, without LONG: no sequences are tried.
    """
    made = {family: each for family, each in surface.items() if not each.unmade}
    operations = {op for each in made.values() for op in each.operations}
    every = [each for of_clause in chosen.values() for each in of_clause if each.run and each.family in made]
    checks = [each for each in every if not each.option and each.clause != LONG]
    said = _said(implementation, made, operations, checks)
    reaches: dict[tuple[str, str], Reach] = {}
    for check, outcome in zip(checks, said, strict=True):
        reach = reaches.setdefault((check.clause, check.family), Reach(check.clause, check.family))
        reach.checks += 1
        reach.judged += not outcome.missing
        if outcome.missing:
            reach.missing = list(dict.fromkeys([*reach.missing, outcome.missing]))
        else:
            reach.through = sorted({*reach.through, *outcome.through})
    lacking = [check for check, outcome in zip(checks, said, strict=True) if outcome.missing]
    gains = [_gain(implementation, made, operations, op, lacking) for each in made.values() for op in each.missing]
    return Forecast(list(reaches.values()), sorted((each for each in gains if each.checks), key=lambda gain: -gain.checks))


class _Behind(Judge):
    """A judge of a door; through a pipe, if that is where the implementation is."""

    def __init__(self, door: Door, by_value: bool) -> None:
        super().__init__(door)
        self._by_value = by_value

    def begin(self, check: Check | None = None) -> Subject:
        subject = super().begin(check)
        subject.by_value = self._by_value
        return subject


def _said(implementation: Any, families: Mapping[str, Offered], operations: set[str], checks: Sequence[Check]) -> list[Outcome]:
    limits = getattr(implementation, "limits", None) or {}
    # kvref's own caches have a table a layer. What that limit changes is how blocks are counted, and not what can be judged.
    limits = {name: value for name, value in limits.items() if name != "one_block_table"}
    door = Door(limits, operations, families, implementation.formats, implementation.level)
    judge = _Behind(door, isinstance(implementation, OverStdio))
    found = [judge.ask_about(check) for check in checks]
    return [
        Outcome(each.check.name, "failed", through=list(each.through)) if isinstance(each, Failure) else each for each in found
    ]


def _gain(
    implementation: Any, families: Mapping[str, Offered], operations: set[str], op: str, lacking: Sequence[Check]
) -> Gain:  # fmt: skip
    family = next(name for name, each in families.items() if op in each.missing)
    concerned = [check for check in lacking if check.family == family]
    said = _said(implementation, families, {*operations, op}, concerned)
    more = [check for check, outcome in zip(concerned, said, strict=True) if not outcome.missing]
    return Gain(op, len(more), list(dict.fromkeys(check.clause for check in more)))
