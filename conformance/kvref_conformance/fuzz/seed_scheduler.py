"""The scheduler of a search. It prefers families that still reach new states, and neighbors of the seeds that reached them.

It does not use the time: the same seed, with the same results in the same order, schedules the same units.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvref_conformance.fuzz.work_unit import USUAL_BYTES, Kind, Transition, UnitResult, WorkUnit, neighbor_seed

UNITS_PER_TURN = 4  # call sequences per turn (per task of a worker), which take about half a second
UNITS_IN_FIRST_TURN = 2  # call sequences in the first turn of each family; all families have one before any has a second
CHECK_EVERY, SOAK_EVERY = 3, 24  # every 3rd turn runs checks, every 24th a soak
CHECKS_PER_TURN = 16  # checks per turn, until all checks of the family have run once; then UNITS_PER_TURN
MIN_WEIGHT = 0.2  # minimum weight of a family, also if it no longer reaches new states
DECAY = 0.98  # the factor by which the weight of a family decays with each of its call sequences
NEIGHBOR_SHARE = 0.5  # the share of seeds that are neighbors of a seed that reached something new


@dataclass
class Seed:
    """A seed that reached something new.

    bytes_used: how many bytes it used. num_new: how many new states and transitions; num_neighbors: how many neighbors were
    scheduled.
    """

    unit: WorkUnit
    bytes_used: int
    num_new: int
    num_neighbors: int = 0


@dataclass
class StateCounts:
    """What a search reached in one family. weight: a decaying average of new states and transitions per call sequence."""

    states: set[str] = field(default_factory=set)
    transitions: set[Transition] = field(default_factory=set)
    seeds: list[Seed] = field(default_factory=list)
    weight: float = 1.0

    def add_result(self, result: UnitResult) -> int:
        """Add a result. Returns how many of its states and transitions are new."""
        new = len(result.states - self.states) + len(result.transitions - self.transitions)
        self.states |= result.states
        self.transitions |= result.transitions
        if new:
            self.seeds.append(Seed(result.unit, result.bytes_used or USUAL_BYTES, new))
        self.weight = DECAY * self.weight + (1 - DECAY) * new
        return new


class SeedScheduler:
    """The scheduler: `next_turn` returns the units of the next turn."""

    def __init__(self, machines: Sequence[str], checks: Mapping[str, int], soaks: Sequence[str], seed: int) -> None:
        """machines, soaks: the families with a state machine, or a workload. checks: the number of checks by family.

        seed: determines the random choices, and the range of numbers that are used as seeds.
        """
        self.counts = {family: StateCounts() for family in machines}
        self.first_units: list[WorkUnit] = []  # units to schedule before all others
        self._excluded: set[tuple[str, str, int]] = set()
        self.num_scheduled: dict[str, int] = {}  # number of scheduled units: of "calls" in total, of the others per family
        self._rng = random.Random(seed)
        self._base = seed << 32
        self._turns = 0
        self._unscheduled_families = list(self.counts)  # families that had no turn yet
        self._others: dict[Kind, dict[str, int]] = {"check": dict(checks), "soak": dict.fromkeys(soaks, 1)}

    def next_turn(self) -> list[WorkUnit]:
        """The units of the next turn; empty if there is nothing to do."""
        if self.first_units:
            turn, self.first_units = self.first_units[:UNITS_PER_TURN], self.first_units[UNITS_PER_TURN:]
            return turn
        self._turns += 1
        if self._turns % SOAK_EVERY == 0 and (turn := self._next_others("soak", 1)):
            return turn
        if (self._turns % CHECK_EVERY == 0 or not self.counts) and (turn := self._next_others("check", UNITS_PER_TURN)):
            return turn
        return self._next_sequences() if self.counts else self._next_others("soak", 1)

    def can_schedule(self, unit: WorkUnit) -> bool:
        """Whether the unit can be scheduled. The implementation may offer less than in an earlier run."""
        return unit.family in (self.counts if unit.kind == "calls" else self._others[unit.kind])

    def exclude(self, unit: WorkUnit) -> None:
        """Do not schedule this check or soak again, because it would fail again."""
        self._excluded.add((unit.family, unit.kind, int(unit.seed) % self._others[unit.kind][unit.family]))

    def _next_others(self, kind: Kind, count: int) -> list[WorkUnit]:
        """Units of one family with checks or soaks; the families take turns."""
        among = self._others[kind]
        for family, kinds in list(among.items()):
            among[family] = among.pop(family)
            turn = list[WorkUnit]()
            unasked = kinds - self.num_scheduled.get(f"{kind} {family}", 0)
            most = min(CHECKS_PER_TURN, unasked) if kind == "check" and unasked > 0 else count
            for _ in range(kinds):
                number = self.num_scheduled.get(f"{kind} {family}", 0)
                self.num_scheduled[f"{kind} {family}"] = number + 1
                if (family, kind, number % kinds) not in self._excluded:
                    turn.append(WorkUnit(family, kind, str(number)))
                if len(turn) == min(most, kinds):
                    break
            if turn:
                return turn
        return []

    def _next_sequences(self) -> list[WorkUnit]:
        if self._unscheduled_families:
            family, count = self._unscheduled_families.pop(0), UNITS_IN_FIRST_TURN
        else:
            (family,) = self._rng.choices(list(self.counts), [MIN_WEIGHT + met.weight for met in self.counts.values()])
            count = UNITS_PER_TURN
        kept, turn = self.counts[family].seeds, list[WorkUnit]()
        for _ in range(count):
            other = self._next_number()
            if kept and self._rng.random() < NEIGHBOR_SHARE:
                (near,) = self._rng.choices(kept, [each.num_new / (1 + each.num_neighbors) for each in kept])
                near.num_neighbors += 1
                seed = neighbor_seed(near.unit.seed, self._rng.randrange(1, max(2, near.bytes_used)), other)
            else:
                seed = str(other)
            turn.append(WorkUnit(family, "calls", seed))
        return turn

    def _next_number(self) -> int:
        self.num_scheduled["calls"] = self.num_scheduled.get("calls", 0) + 1
        return self._base + self.num_scheduled["calls"] - 1
