"""The scheduler of a search. It prefers families that still reach new states, and neighbors of the seeds that reached them.

It does not use the time: the same seed, with the same results in the same order, schedules the same units.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvref_conformance.fuzz.work_unit import USUAL, Kind, Transition, UnitResult, WorkUnit, neighbour

TURN = 4  # call sequences per turn (per task of a worker), which take about half a second
FIRST = 2  # call sequences in the first turn of each family; all families have one before any has a second
CHECK_EVERY, SOAK_EVERY = 3, 24  # every 3rd turn runs checks, every 24th a soak
CHECKS = 16  # checks per turn, until all checks of the family have run once; then TURN
LEAST = 0.2  # minimum weight of a family, also if it no longer reaches new states
FADING = 0.98  # the factor by which the weight of a family decays with each of its call sequences
NEAR = 0.5  # the share of seeds that are neighbors of a seed that reached something new


@dataclass
class Seed:
    """A seed that reached something new.

    taken: how many bytes it used. brought: how many new states and transitions; tried: how many neighbors were scheduled.
    """

    unit: WorkUnit
    taken: int
    brought: int
    tried: int = 0


@dataclass
class StateCounts:
    """What a search reached in one family. worth: a decaying average of new states and transitions per call sequence."""

    states: set[str] = field(default_factory=set)
    transitions: set[Transition] = field(default_factory=set)
    kept: list[Seed] = field(default_factory=list)
    worth: float = 1.0

    def add(self, seen: UnitResult) -> int:
        """Add a result. Returns how many of its states and transitions are new."""
        new = len(seen.states - self.states) + len(seen.transitions - self.transitions)
        self.states |= seen.states
        self.transitions |= seen.transitions
        if new:
            self.kept.append(Seed(seen.unit, seen.taken or USUAL, new))
        self.worth = FADING * self.worth + (1 - FADING) * new
        return new


class SeedScheduler:
    """The scheduler: `next` returns the units of the next turn."""

    def __init__(self, machines: Sequence[str], checks: Mapping[str, int], soaks: Sequence[str], seed: int) -> None:
        """machines, soaks: the families with a state machine, or a workload. checks: the number of checks by family.

        seed: determines the random choices, and the range of numbers that are used as seeds.
        """
        self.met = {family: StateCounts() for family in machines}
        self.first: list[WorkUnit] = []  # units to schedule before all others
        self._left_out: set[tuple[str, str, int]] = set()
        self.handed: dict[str, int] = {}  # number of scheduled units: of "calls" in total, of the others per family
        self._rng = random.Random(seed)
        self._base = seed << 32
        self._turns = 0
        self._unknown = list(self.met)  # families that had no turn yet
        self._others: dict[Kind, dict[str, int]] = {"check": dict(checks), "soak": dict.fromkeys(soaks, 1)}

    def next(self) -> list[WorkUnit]:
        """The units of the next turn; empty if there is nothing to do."""
        if self.first:
            turn, self.first = self.first[:TURN], self.first[TURN:]
            return turn
        self._turns += 1
        if self._turns % SOAK_EVERY == 0 and (turn := self._other("soak", 1)):
            return turn
        if (self._turns % CHECK_EVERY == 0 or not self.met) and (turn := self._other("check", TURN)):
            return turn
        return self._calls() if self.met else self._other("soak", 1)

    def has(self, unit: WorkUnit) -> bool:
        """Whether the unit can be scheduled. The implementation may offer less than in an earlier run."""
        return unit.family in (self.met if unit.kind == "calls" else self._others[unit.kind])

    def leave_out(self, unit: WorkUnit) -> None:
        """Do not schedule this check or soak again, because it would fail again."""
        self._left_out.add((unit.family, unit.kind, int(unit.seed) % self._others[unit.kind][unit.family]))

    def _other(self, kind: Kind, count: int) -> list[WorkUnit]:
        """Units of one family with checks or soaks; the families take turns."""
        among = self._others[kind]
        for family, kinds in list(among.items()):
            among[family] = among.pop(family)
            turn = list[WorkUnit]()
            unasked = kinds - self.handed.get(f"{kind} {family}", 0)
            most = min(CHECKS, unasked) if kind == "check" and unasked > 0 else count
            for _ in range(kinds):
                number = self.handed.get(f"{kind} {family}", 0)
                self.handed[f"{kind} {family}"] = number + 1
                if (family, kind, number % kinds) not in self._left_out:
                    turn.append(WorkUnit(family, kind, str(number)))
                if len(turn) == min(most, kinds):
                    break
            if turn:
                return turn
        return []

    def _calls(self) -> list[WorkUnit]:
        if self._unknown:
            family, count = self._unknown.pop(0), FIRST
        else:
            (family,) = self._rng.choices(list(self.met), [LEAST + met.worth for met in self.met.values()])
            count = TURN
        kept, turn = self.met[family].kept, list[WorkUnit]()
        for _ in range(count):
            other = self._number()
            if kept and self._rng.random() < NEAR:
                (near,) = self._rng.choices(kept, [each.brought / (1 + each.tried) for each in kept])
                near.tried += 1
                seed = neighbour(near.unit.seed, self._rng.randrange(1, max(2, near.taken)), other)
            else:
                seed = str(other)
            turn.append(WorkUnit(family, "calls", seed))
        return turn

    def _number(self) -> int:
        self.handed["calls"] = self.handed.get("calls", 0) + 1
        return self._base + self.handed["calls"] - 1
