"""The main loop of a search: schedules units until the time is over, and processes their results."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvref_conformance.fuzz.corpus import CampaignRun, Corpus, KnownFailure, ProgressPoint
from kvref_conformance.fuzz.deduplication import DistinctFailures
from kvref_conformance.fuzz.seed_scheduler import SeedScheduler
from kvref_conformance.fuzz.work_unit import UnitFailure, UnitResult, WorkUnit
from kvref_conformance.fuzz.worker_tasks import Again, again, shrunk, units
from kvref_conformance.traces.format import TraceError

LOOK = 0.25  # seconds between two updates of the progress
SAVE = 2.0  # seconds between two times at which everything is saved
POINTS = 120  # maximum number of stored points per run


class WorkersLost(Exception):
    """A task was not finished because its workers ended."""


class WorkerPool(Protocol):
    """The interface of the worker pool: see `workers.Workers`."""

    count: int

    @property
    def idle(self) -> int: ...
    @property
    def under_way(self) -> int: ...
    def ask(self, about: Any, work: Callable[..., Any], *arguments: Any) -> None: ...
    def next(self, seconds: float) -> tuple[Any, Any] | None: ...


@dataclass
class Listener:
    """Callbacks of a search.

    tell: progress. failed: a new failure. of_before: the state of a failure of an earlier run. spoiled: its trace is invalid, and
    why. write: the corpus should be written.
    """

    tell: Callable[["Campaign"], None] = lambda exploring: None
    failed: Callable[[KnownFailure, UnitFailure], None] = lambda known, failed: None
    of_before: Callable[[KnownFailure, Again], None] = lambda known, again: None
    spoiled: Callable[[KnownFailure, str], None] = lambda known, why: None
    write: Callable[["Campaign"], None] = lambda exploring: None


@dataclass
class Campaign:
    """One run of a search, which continues from the corpus of earlier runs."""

    team: WorkerPool
    corpus: Corpus
    steering: SeedScheduler
    run: CampaignRun
    listener: Listener = field(default_factory=Listener)
    began: float = field(default_factory=time.monotonic)
    units: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.failures = DistinctFailures(self.corpus)
        self._of_before = list(self.corpus.failures)
        self._old = dict.fromkeys(each for each in self.corpus.seeds if self.steering.has(each))
        self.steering.first = list(self._old)
        self._written, self._limit = -math.inf, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def states(self) -> int:
        return sum(len(met.states) for met in self.steering.met.values())

    @property
    def transitions(self) -> int:
        return sum(len(met.transitions) for met in self.steering.met.values())

    def go(self, seconds: float) -> None:
        """Search for `seconds`, then wait until all tasks have ended and all failures are shrunk, as long as there are workers.

        Raises CannotRun and KeyboardInterrupt, after saving everything that was found.
        """
        self._limit = seconds
        try:
            while self.seconds < seconds or (self.team.count and (self.team.under_way or self.failures.busy)):
                while self.team.idle and self._hand_out(over=self.seconds >= seconds):
                    pass
                if (done := self.team.next(LOOK)) is not None:
                    self._take(*done)
                self.listener.tell(self)
                if self.seconds - self._written > SAVE:
                    self._write()
        finally:
            self.failures.keep_unfinished()
            self._write()

    def _hand_out(self, over: bool) -> bool:
        """Submit one task. Returns False if there is none. over: the time is over; only shrink failures."""
        if (seen := self.failures.next()) is not None:
            self.team.ask(partial(self._short, seen), shrunk, seen)
        elif over:
            return False
        elif self._of_before:
            self._ask_again(self._of_before.pop(0))
        elif turn := self.steering.next():
            self.team.ask(partial(self._seen, turn), units, turn)
        else:
            return False
        return True

    def _ask_again(self, known: KnownFailure) -> None:
        if not self.steering.has(known.unit):  # the failure stays in the corpus until its unit can run again
            self.listener.of_before(known, Again("not offered", f"{known.unit.family} {known.unit.kind}"))
            return
        trace: list[str] = []
        try:
            trace = self.corpus.trace(known)
        except TraceError as error:
            self.listener.spoiled(known, str(error))
        if trace:
            self.team.ask(partial(self._still, known), again, known.clause, known.unit, trace)
        else:  # it was not shrunk in time, or its trace is invalid: run its unit again
            self.team.ask(partial(self._met_again, known), units, [known.unit])

    def _take(self, what: Callable[[Any], None], came: Any) -> None:
        if isinstance(came, Exception) and not isinstance(came, WorkersLost):
            raise came
        what(came)

    def _seen(self, turn: Sequence[WorkUnit], came: list[UnitResult] | WorkersLost) -> None:
        if isinstance(came, WorkersLost):
            self.run.lost += len(turn)
            return
        for seen in came:
            self.units, self.calls = self.units + 1, self.calls + seen.calls
            self._old.pop(seen.unit, None)
            if seen.unit.kind == "calls":
                self.steering.met[seen.unit.family].add(seen)
            if seen.found:
                self.failures.met(seen)
            if seen.failed:
                self._new(seen.failed)
            if seen.unit.kind != "calls" and (seen.found or seen.failed):
                self.steering.leave_out(seen.unit)

    def _short(self, seen: UnitResult, came: UnitFailure | WorkersLost) -> None:
        assert seen.found
        if isinstance(came, WorkersLost):
            self.run.lost += 1
            self.failures.keep(seen)
        else:
            self._new(came)
        self.failures.go_on(seen.found.clause, seen.unit.family, over=self.seconds >= self._limit)

    def _new(self, failed: UnitFailure) -> None:
        if (known := self.failures.short(failed)) is not None:
            self.listener.failed(known, failed)
            self._written = -math.inf

    def _still(self, known: KnownFailure, came: Again | WorkersLost) -> None:
        if isinstance(came, WorkersLost):
            return
        if came.still != "broken":
            self._gone(known, came)
        else:
            self.listener.of_before(known, came)

    def _met_again(self, known: KnownFailure, came: list[UnitResult] | WorkersLost) -> None:
        """Process the repeated unit of a failure without a trace. Failures that it finds are treated as new ones."""
        if not isinstance(came, WorkersLost):
            clauses = {each.clause for seen in came for each in (seen.found, seen.failed) if each}
            if known.clause in clauses:
                self.corpus.failures.remove(known)
            else:
                self._gone(known, Again("mended"))
        self._seen([known.unit], came)

    def _gone(self, known: KnownFailure, came: Again) -> None:
        self.corpus.failures.remove(known)
        self.run.mended += [known.clause] if came.still == "mended" else []
        self.listener.of_before(known, came)

    def _point(self) -> None:
        """Add a point with the current numbers. It replaces the last point if that is too close to the one before it."""
        families = {name: [len(met.states), len(met.transitions)] for name, met in self.steering.met.items()}
        came = self.units, self.calls, self.states, self.transitions, len(self.corpus.failures)
        point, points = ProgressPoint(round(self.seconds, 2), *came, families), self.run.points
        if len(points) > 1 and point.seconds - points[-2].seconds < self._limit / POINTS:
            points[-1] = point
        else:
            points.append(point)

    def _write(self) -> None:
        self._written = self.seconds
        self._point()
        kept = [each.unit for met in self.steering.met.values() for each in met.kept]
        self.corpus.seeds = list(dict.fromkeys([*kept, *self._old]))
        self.corpus.handed = self.steering.handed
        self.listener.write(self)
