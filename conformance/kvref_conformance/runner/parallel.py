"""Parallel judging: worker processes run the checks of one implementation in advance, and the judge collects the outcomes.

The unit of work is a family: either its state machine, or all of its other checks. Each worker has its own instance of the
implementation and the same seeds as a single judge, so the outcomes are the same.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from kvref_conformance.calls import interrupts
from kvref_conformance.clauses import Clause
from kvref_conformance.families import all_families
from kvref_conformance.implementations import is_program, runs_foreign_code
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.check_runner import CheckRunner, Failure
from kvref_conformance.runner.options import EXAMPLES, RunOptions
from kvref_conformance.runner.subprocess_runner import SUPPORTED, SubprocessRunner
from kvref_conformance.testlib.registry import Check

MAX_JOBS = 4  # maximum default number of processes
POLL_INTERVAL = 0.05  # seconds between two attempts to end the running workers
Unit = tuple[str, bool]  # a family, and whether the unit is its state machine (or else its other checks)
ResultByCheck = dict[Check, CheckResult | Failure]


def default_jobs(run_options: RunOptions, everything: bool) -> int:
    """The default number of processes.

    It is 1 for a foreign implementation, whose instances might interfere with each other, and for a run that does not include
    all clauses or that tries few call sequences, for which starting processes takes too long.
    """
    foreign = is_program(run_options.name) or runs_foreign_code(run_options.name) or run_options.isolate is not None
    if foreign or not SUPPORTED or not everything or run_options.family or run_options.effort.num_sequences < EXAMPLES:
        return 1
    return min(MAX_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@contextmanager
def run_in_parallel(judge: CheckRunner, chosen: Mapping[Clause, Sequence[Check]], jobs: int) -> Iterator[None]:
    """Run the checks in `jobs` processes while the block runs. With 1, the judge runs them itself."""
    if jobs == 1:
        yield
        return
    ahead = ParallelRunner(judge, [check for checks in chosen.values() for check in checks], jobs)
    judge.runs_elsewhere = ahead.judge_check
    try:
        yield
    finally:
        judge.runs_elsewhere = None
        ahead.close()


class ParallelRunner:
    """A pool of worker processes that run checks. All checks are submitted at once."""

    def __init__(self, judge: CheckRunner, checks: Iterable[Check], processes: int) -> None:
        self._judge = judge
        self._own = threading.local()  # each thread has one judge, with one process
        self._judges: list[SubprocessRunner] = []
        self._over = False
        units: dict[Unit, list[Check]] = {}
        for check in checks:
            units.setdefault((check.family, check.run is None), []).append(check)
        order = list(all_families())  # later families take longer: they are built from earlier ones
        longest_first = sorted(units, key=lambda unit: (unit[1], order.index(unit[0])), reverse=True)
        self._pool = ThreadPoolExecutor(processes)
        self._futures: dict[Unit, Future[ResultByCheck]] = {
            unit: self._pool.submit(self._run_checks, units[unit]) for unit in longest_first
        }

    def judge_check(self, check: Check) -> CheckResult | Failure:
        """Wait for the outcome of a check. Raises CannotRun."""
        with interrupts.allow_interrupts():
            return self._futures[check.family, check.run is None].result()[check]

    def close(self) -> None:
        """End all processes at once."""
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not all(coming.done() for coming in self._futures.values()):  # canceled futures are done
            for judge in self._judges:
                judge.interrupt()
            time.sleep(POLL_INTERVAL)
        for judge in self._judges:  # signal all before waiting for each
            judge.shut_down()
        for judge in self._judges:
            judge.close()

    def _run_checks(self, checks: Sequence[Check]) -> ResultByCheck:
        judge = self._runner_of_thread()
        return {check: judge.judge_check(check) for check in checks if not self._over}

    def _runner_of_thread(self) -> SubprocessRunner:
        """The judge of this thread. Raises CannotRun."""
        if not hasattr(self._own, "judge"):
            self._own.judge = SubprocessRunner(self._judge.name, self._judge.effort, self._judges.append, beside_others=True)
            self._own.judge.progress = lambda *how_far: self._judge.progress(*how_far)
        found: SubprocessRunner = self._own.judge
        return found
