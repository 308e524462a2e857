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
from kvref_conformance.fuzz.worker_tasks import RecheckResult, recheck_failure, run_units, shrink_result
from kvref_conformance.traces.format import TraceError

POLL_INTERVAL = 0.25  # seconds between two updates of the progress
SAVE_INTERVAL = 2.0  # seconds between two times at which everything is saved
MAX_POINTS = 120  # maximum number of stored points per run


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
class CampaignListener:
    """Callbacks of a search.

    tell: progress. failed: a new failure. of_before: the state of a failure of an earlier run. spoiled: its trace is invalid, and
    why. write: the corpus should be written.
    """

    tell: Callable[["Campaign"], None] = lambda exploring: None
    failed: Callable[[KnownFailure, UnitFailure], None] = lambda known, failed: None
    of_before: Callable[[KnownFailure, RecheckResult], None] = lambda known, again: None
    spoiled: Callable[[KnownFailure, str], None] = lambda known, why: None
    write: Callable[["Campaign"], None] = lambda exploring: None


@dataclass
class Campaign:
    """One run of a search, which continues from the corpus of earlier runs."""

    pool: WorkerPool
    corpus: Corpus
    scheduler: SeedScheduler
    run: CampaignRun
    listener: CampaignListener = field(default_factory=CampaignListener)
    began: float = field(default_factory=time.monotonic)
    units: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.failures = DistinctFailures(self.corpus)
        self._earlier_failures = list(self.corpus.failures)
        self._to_recheck = dict.fromkeys(each for each in self.corpus.seeds if self.scheduler.can_schedule(each))
        self.scheduler.first_units = list(self._to_recheck)
        self._written, self._limit = -math.inf, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def states(self) -> int:
        return sum(len(met.states) for met in self.scheduler.counts.values())

    @property
    def transitions(self) -> int:
        return sum(len(met.transitions) for met in self.scheduler.counts.values())

    def run_for(self, seconds: float) -> None:
        """Search for `seconds`, then wait until all tasks have ended and all failures are shrunk, as long as there are workers.

        Raises CannotRun and KeyboardInterrupt, after saving everything that was found.
        """
        self._limit = seconds
        try:
            while self.seconds < seconds or (self.pool.count and (self.pool.under_way or self.failures.is_shrinking)):
                while self.pool.idle and self._submit_task(over=self.seconds >= seconds):
                    pass
                if (done := self.pool.next(POLL_INTERVAL)) is not None:
                    self._process_result(*done)
                self.listener.tell(self)
                if self.seconds - self._written > SAVE_INTERVAL:
                    self._write()
        finally:
            self.failures.store_unfinished()
            self._write()

    def _submit_task(self, over: bool) -> bool:
        """Submit one task. Returns False if there is none. over: the time is over; only shrink failures."""
        if (result := self.failures.next_to_shrink()) is not None:
            self.pool.ask(partial(self._add_shrunk, result), shrink_result, result)
        elif over:
            return False
        elif self._earlier_failures:
            self._submit_recheck(self._earlier_failures.pop(0))
        elif turn := self.scheduler.next_turn():
            self.pool.ask(partial(self._add_results, turn), run_units, turn)
        else:
            return False
        return True

    def _submit_recheck(self, known: KnownFailure) -> None:
        if not self.scheduler.can_schedule(known.unit):  # the failure stays in the corpus until its unit can run again
            self.listener.of_before(known, RecheckResult("not offered", f"{known.unit.family} {known.unit.kind}"))
            return
        trace: list[str] = []
        try:
            trace = self.corpus.trace(known)
        except TraceError as error:
            self.listener.spoiled(known, str(error))
        if trace:
            self.pool.ask(partial(self._add_recheck, known), recheck_failure, known.clause, known.unit, trace)
        else:  # it was not shrunk in time, or its trace is invalid: run its unit again
            self.pool.ask(partial(self._add_repeated_unit, known), run_units, [known.unit])

    def _process_result(self, what: Callable[[Any], None], came: Any) -> None:
        if isinstance(came, Exception) and not isinstance(came, WorkersLost):
            raise came
        what(came)

    def _add_results(self, turn: Sequence[WorkUnit], came: list[UnitResult] | WorkersLost) -> None:
        if isinstance(came, WorkersLost):
            self.run.lost += len(turn)
            return
        for result in came:
            self.units, self.calls = self.units + 1, self.calls + result.calls
            self._to_recheck.pop(result.unit, None)
            if result.unit.kind == "calls":
                self.scheduler.counts[result.unit.family].add_result(result)
            if result.fuzz_failure:
                self.failures.add_failure(result)
            if result.failure:
                self._add_failure(result.failure)
            if result.unit.kind != "calls" and (result.fuzz_failure or result.failure):
                self.scheduler.exclude(result.unit)

    def _add_shrunk(self, result: UnitResult, came: UnitFailure | WorkersLost) -> None:
        assert result.fuzz_failure
        if isinstance(came, WorkersLost):
            self.run.lost += 1
            self.failures.store_unshrunk(result)
        else:
            self._add_failure(came)
        self.failures.finish_shrinking(result.fuzz_failure.clause, result.unit.family, over=self.seconds >= self._limit)

    def _add_failure(self, failed: UnitFailure) -> None:
        if (known := self.failures.add_shrunk(failed)) is not None:
            self.listener.failed(known, failed)
            self._written = -math.inf

    def _add_recheck(self, known: KnownFailure, came: RecheckResult | WorkersLost) -> None:
        if isinstance(came, WorkersLost):
            return
        if came.still != "broken":
            self._remove_failure(known, came)
        else:
            self.listener.of_before(known, came)

    def _add_repeated_unit(self, known: KnownFailure, came: list[UnitResult] | WorkersLost) -> None:
        """Process the repeated unit of a failure without a trace. Failures that it finds are treated as new ones."""
        if not isinstance(came, WorkersLost):
            clauses = {each.clause for result in came for each in (result.fuzz_failure, result.failure) if each}
            if known.clause in clauses:
                self.corpus.failures.remove(known)
            else:
                self._remove_failure(known, RecheckResult("mended"))
        self._add_results([known.unit], came)

    def _remove_failure(self, known: KnownFailure, came: RecheckResult) -> None:
        self.corpus.failures.remove(known)
        self.run.mended += [known.clause] if came.still == "mended" else []
        self.listener.of_before(known, came)

    def _add_point(self) -> None:
        """Add a point with the current numbers. It replaces the last point if that is too close to the one before it."""
        families = {name: [len(met.states), len(met.transitions)] for name, met in self.scheduler.counts.items()}
        came = self.units, self.calls, self.states, self.transitions, len(self.corpus.failures)
        point, points = ProgressPoint(round(self.seconds, 2), *came, families), self.run.points
        if len(points) > 1 and point.seconds - points[-2].seconds < self._limit / MAX_POINTS:
            points[-1] = point
        else:
            points.append(point)

    def _write(self) -> None:
        self._written = self.seconds
        self._add_point()
        kept = [each.unit for met in self.scheduler.counts.values() for each in met.seeds]
        self.corpus.seeds = list(dict.fromkeys([*kept, *self._to_recheck]))
        self.corpus.handed = self.scheduler.num_scheduled
        self.listener.write(self)
