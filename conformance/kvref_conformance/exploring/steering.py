"""Where a search goes next: to families in which it still meets what is new, and from the seeds that met it.

No clock is asked: the same seed and the same answers in the same order lead to the same units.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvref_conformance.exploring.seen import Seen, Transition
from kvref_conformance.exploring.units import USUAL, Kind, Unit, neighbour

TURN = 4  # sequences handed out at once, which take about half a second
FIRST = 2  # of each family, before any has more
CHECK_EVERY, SOAK_EVERY = 3, 24  # turns
CHECKS = 16  # in a turn, until all of a family were asked once; then as many as sequences
LEAST = 0.2  # of what a family is worth that no longer meets anything new
FADING = 0.98  # of what it was worth, with each of its sequences
NEAR = 0.5  # of the seeds: neighbours of those that met something new


@dataclass
class Kept:
    """A seed that met something new. brought: how many states and transitions; tried: how many neighbours it was given."""

    unit: Unit
    taken: int
    brought: int
    tried: int = 0


@dataclass
class Met:
    """What a search met in one family."""

    states: set[str] = field(default_factory=set)
    transitions: set[Transition] = field(default_factory=set)
    kept: list[Kept] = field(default_factory=list)
    worth: float = 1.0  # what it met lately that was new, a sequence

    def add(self, seen: Seen) -> int:
        """How much of it is new."""
        new = len(seen.states - self.states) + len(seen.transitions - self.transitions)
        self.states |= seen.states
        self.transitions |= seen.transitions
        if new:
            self.kept.append(Kept(seen.unit, seen.taken or USUAL, new))
        self.worth = FADING * self.worth + (1 - FADING) * new
        return new


class Steering:
    def __init__(self, machines: Sequence[str], checks: Mapping[str, int], soaks: Sequence[str], seed: int) -> None:
        """The families that have a machine, checks (and how many), a workload. Numbers of seeds begin where `seed` says."""
        self.met = {family: Met() for family in machines}
        self.first: list[Unit] = []  # to be handed out before all else
        self._left_out: set[tuple[str, str, int]] = set()
        self.handed: dict[str, int] = {}  # units by kind, "calls" in all and the others a family
        self._rng = random.Random(seed)
        self._base = seed << 32
        self._turns = 0
        self._unknown = list(self.met)  # families that no turn went to yet
        self._others: dict[Kind, dict[str, int]] = {"check": dict(checks), "soak": dict.fromkeys(soaks, 1)}

    def next(self) -> list[Unit]:
        """The units of a turn; none where there is nothing to be done."""
        if self.first:
            turn, self.first = self.first[:TURN], self.first[TURN:]
            return turn
        self._turns += 1
        if self._turns % SOAK_EVERY == 0 and (turn := self._other("soak", 1)):
            return turn
        if (self._turns % CHECK_EVERY == 0 or not self.met) and (turn := self._other("check", TURN)):
            return turn
        return self._calls() if self.met else self._other("soak", 1)

    def has(self, unit: Unit) -> bool:
        """Whether the unit can be asked for: the implementation may offer less than it did."""
        return unit.family in (self.met if unit.kind == "calls" else self._others[unit.kind])

    def leave_out(self, unit: Unit) -> None:
        """A check or a soak that would only fail again."""
        self._left_out.add((unit.family, unit.kind, int(unit.seed) % self._others[unit.kind][unit.family]))

    def _other(self, kind: Kind, count: int) -> list[Unit]:
        """As many units of a family, of the families in turn."""
        among = self._others[kind]
        for family, kinds in list(among.items()):
            among[family] = among.pop(family)
            turn = list[Unit]()
            unasked = kinds - self.handed.get(f"{kind} {family}", 0)
            most = min(CHECKS, unasked) if kind == "check" and unasked > 0 else count
            for _ in range(kinds):
                number = self.handed.get(f"{kind} {family}", 0)
                self.handed[f"{kind} {family}"] = number + 1
                if (family, kind, number % kinds) not in self._left_out:
                    turn.append(Unit(family, kind, str(number)))
                if len(turn) == min(most, kinds):
                    break
            if turn:
                return turn
        return []

    def _calls(self) -> list[Unit]:
        if self._unknown:
            family, count = self._unknown.pop(0), FIRST
        else:
            (family,) = self._rng.choices(list(self.met), [LEAST + met.worth for met in self.met.values()])
            count = TURN
        kept, turn = self.met[family].kept, list[Unit]()
        for _ in range(count):
            other = self._number()
            if kept and self._rng.random() < NEAR:
                (near,) = self._rng.choices(kept, [each.brought / (1 + each.tried) for each in kept])
                near.tried += 1
                seed = neighbour(near.unit.seed, self._rng.randrange(1, max(2, near.taken)), other)
            else:
                seed = str(other)
            turn.append(Unit(family, "calls", seed))
        return turn

    def _number(self) -> int:
        self.handed["calls"] = self.handed.get("calls", 0) + 1
        return self._base + self.handed["calls"] - 1
