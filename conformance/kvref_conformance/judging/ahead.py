"""Several processes that judge one implementation side by side: what a clause asks is answered before it is asked.

A process is asked what one family asks: its machine, or the checks that are written out. Each has an implementation of its own,
with which it begins as a judge alone does: what it says is the same.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from kvref_conformance.checking.registry import Check
from kvref_conformance.clauses import Clause
from kvref_conformance.conversation import interrupts
from kvref_conformance.families import all_families
from kvref_conformance.implementations import is_foreign, is_program
from kvref_conformance.judging.asked import EXAMPLES, Asked
from kvref_conformance.judging.isolated import POSSIBLE, IsolatedJudge
from kvref_conformance.judging.judge import Failure, Judge
from kvref_conformance.outcome import Outcome

MOST = 4  # processes, unless asked for more
LOOK = 0.05  # seconds between two attempts to end what is still running
Unit = tuple[str, bool]  # a family, and whether its machine is asked
Said = dict[Check, Outcome | Failure]


def usual_jobs(asked: Asked, everything: bool) -> int:
    """In how many processes to judge, where nobody says.

    Several of a foreign implementation might be in each other's way, and for less than everything they are not worth starting.
    """
    foreign = is_program(asked.name) or is_foreign(asked.name) or asked.isolate is not None
    if foreign or not POSSIBLE or not everything or asked.family or asked.effort.sequences < EXAMPLES:
        return 1
    return min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@contextmanager
def side_by_side(judge: Judge, chosen: Mapping[Clause, Sequence[Check]], jobs: int) -> Iterator[None]:
    """Inside the block the judge has its checks asked in so many processes, all of them at once."""
    if jobs == 1:
        yield
        return
    ahead = Ahead(judge, [check for checks in chosen.values() for check in checks], jobs)
    judge.elsewhere = ahead.ask_about
    try:
        yield
    finally:
        judge.elsewhere = None
        ahead.close()


class Ahead:
    """What checks say, asked in so many processes."""

    def __init__(self, judge: Judge, checks: Iterable[Check], processes: int) -> None:
        self._judge = judge
        self._own = threading.local()  # of each thread, its judge
        self._judges: list[IsolatedJudge] = []
        self._over = False
        units: dict[Unit, list[Check]] = {}
        for check in checks:
            units.setdefault((check.family, check.run is None), []).append(check)
        order = list(all_families())  # in which caches come behind what they are made of
        longest_first = sorted(units, key=lambda unit: (unit[1], order.index(unit[0])), reverse=True)
        self._pool = ThreadPoolExecutor(processes)
        self._coming: dict[Unit, Future[Said]] = {unit: self._pool.submit(self._ask, units[unit]) for unit in longest_first}

    def ask_about(self, check: Check) -> Outcome | Failure:
        """What it says, as soon as that is known. Raises CannotRun."""
        with interrupts.prompt():
            return self._coming[check.family, check.run is None].result()[check]

    def close(self) -> None:
        """End every process, whatever it is doing."""
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not all(coming.done() for coming in self._coming.values()):  # those that were cancelled are
            for judge in self._judges:
                judge.interrupt()
            time.sleep(LOOK)
        for judge in self._judges:  # all at once
            judge.hang_up()
        for judge in self._judges:
            judge.close()

    def _ask(self, checks: Sequence[Check]) -> Said:
        judge = self._beside()
        return {check: judge.ask_about(check) for check in checks if not self._over}

    def _beside(self) -> IsolatedJudge:
        """This thread's judge. Raises CannotRun."""
        if not hasattr(self._own, "judge"):
            self._own.judge = IsolatedJudge(self._judge.name, self._judge.effort, self._judges.append, beside_others=True)
            self._own.judge.progress = lambda *how_far: self._judge.progress(*how_far)
        found: IsolatedJudge = self._own.judge
        return found
