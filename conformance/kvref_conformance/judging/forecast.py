"""A preview for `kvref check NAME --list`: which clauses can be judged, and how many more with one additional operation.

The implementation itself is not judged. Instead, the checks run on kvref's own caches, restricted to the same operations, formats
and limits (judging/door.py). These caches are correct, so each check that is not "not offered" there can judge.
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
LONG = "LAW-18"  # production sizes: its checks take as long as all others together, too long to run once per operation


@dataclass
class Reach:
    """The checks of one clause in one family.

    checks: how many there are. judged: how many can judge. through: the derived operations that those use. missing: the reasons
    why the others cannot judge.
    """

    clause: str
    family: str
    checks: int = 0
    judged: int = 0
    through: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def how(self) -> str:
        """The result in one or two words."""
        if not self.judged:
            return "not offered"
        if self.judged < self.checks:
            return "partly"
        return "derived" if self.through else "directly"


@dataclass(frozen=True)
class Gain:
    """The benefit of providing one more operation: the number of additional checks that could judge, and their clauses."""

    operation: str
    checks: int
    clauses: list[str]


@dataclass(frozen=True)
class Forecast:
    reaches: list[Reach]
    gains: list[Gain]  # sorted by the number of checks, largest first


def forecast(implementation: Any, surface: Mapping[str, Offered], chosen: Chosen) -> Forecast:
    """Preview the chosen clauses. surface: the provided operations of each family.

    State machines, LONG, and checks that need an option are left out.
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
    """A judge of a restricted wrapper. by_value: whether the implementation is reached through a pipe."""

    def __init__(self, door: Door, by_value: bool) -> None:
        super().__init__(door)
        self._by_value = by_value

    def begin(self, check: Check | None = None) -> Subject:
        subject = super().begin(check)
        subject.by_value = self._by_value
        return subject


def _said(implementation: Any, families: Mapping[str, Offered], operations: set[str], checks: Sequence[Check]) -> list[Outcome]:
    limits = getattr(implementation, "limits", None) or {}
    # kvref's own caches have one block table per layer. `one_block_table` changes how blocks are counted, not what can be judged.
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
