"""The tasks of a worker process: functions that take the worker's judge and return a result to the main process.

The worker runs the implementation in another process (`judging.isolated`). If that process ends or hangs, the worker reports it.
If the worker is killed, that process finds its pipe closed and ends too.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import BOUNDLESS, memory_limit, time_limit
from kvref_conformance.fuzz.findings import FuzzFailure, Search
from kvref_conformance.fuzz.work_unit import Shape, UnitFailure, UnitResult, WorkUnit, drawn, shape_of
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.outcome import CheckResult, NotOffered
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.replay import replay
from kvref_conformance.runner.subprocess_runner import SubprocessRunner
from kvref_conformance.runner.subprocess_worker import checked
from kvref_conformance.soak.cache_soak import a_serving_workload, soak
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.format import parsed
from kvref_conformance.traces.shrinking import ReplayResult

STEPS = 60  # maximum calls per call sequence
EVENTS, SECONDS = 1000, 60.0  # maximum events and duration of a soak
T = TypeVar("T")
_own = threading.local()  # each thread of a worker has one judge


def at_work(name: str, timeout: float, work: Callable[..., T], *about: Any) -> T:
    """Return work(judge, *about) with this worker's judge of the implementation `name`. Raises CannotRun."""
    asked = name, timeout
    if getattr(_own, "asked", None) != asked:
        if hasattr(_own, "judge"):
            _own.judge.close()
        _own.judge, _own.asked = SubprocessRunner(name, Effort(timeout=timeout, real=True), beside_others=True), asked
    return work(_own.judge, *about)


def ready(judge: SubprocessRunner) -> None:
    """Import slow modules in advance."""
    judge.run(_imported)


def _imported(judge: CheckRunner) -> None:
    from kvref_conformance.fuzz import hypothesis_runner, state_coverage  # noqa: F401 - imported for later tasks


def units(judge: SubprocessRunner, asked: Sequence[WorkUnit]) -> list[UnitResult]:
    """Run units in order."""
    return [unit(judge, each) for each in asked]


def unit(judge: SubprocessRunner, asked: WorkUnit) -> UnitResult:
    """Run one unit."""
    return {"calls": _calls, "check": _check, "soak": _soak}[asked.kind](judge, asked)


def shrunk(judge: SubprocessRunner, seen: UnitResult) -> UnitFailure:
    """Shrink the failure of a result."""
    assert seen.found
    machine = seen.unit.kind == "calls"
    check = Check(seen.found.clause, seen.unit.family, None) if machine else all_checks()[_asked(seen.unit)[0]]
    outcome = judge.shown(Failure(check, seen.found.conversation, seen.found.broken, seen.through))
    if not machine:
        shape: Shape = (check.name,)
    elif '"judge": "model"' in outcome.trace[0]:
        shape = shape_of(outcome.trace)
    else:  # not shrunk, because a replay does not reproduce it; only its last call is comparable with other failures
        shape = shape_of(outcome.trace)[-1:]
    return UnitFailure(seen.unit, check.clause, shape, outcome)


@dataclass(frozen=True)
class Again:
    """Whether a failure of an earlier run still occurs. why: what is not offered any more."""

    still: Literal["broken", "mended", "not offered"]
    why: str = ""


def again(judge: SubprocessRunner, clause: str, asked: WorkUnit, trace: Sequence[str]) -> Again:
    """Replay the trace of a failure. If it has none, or if only its check can show it, run its unit again."""
    try:
        if trace and (read := parsed(Path("trace"), list(trace))).header.judge == "model":
            return Again("mended" if replay(read, judge).parted_at is None else "broken")
        seen = unit(judge, asked)
    except (NotOffered, UnknownObject) as lacking:
        return Again("not offered", str(lacking))
    clauses = {each.clause for each in (seen.found, seen.failed) if each}
    return Again("broken" if clause in clauses else "mended")


def _calls(judge: SubprocessRunner, asked: WorkUnit) -> UnitResult:
    try:
        return judge.run(_explored, asked)
    except RunEnded as ended:
        found = FuzzFailure(ended.broken.clause or "LAW-01", ended.conversation, ended.broken)
        return UnitResult(asked, len(ended.conversation), found=found)


def _explored(judge: CheckRunner, asked: WorkUnit) -> UnitResult:
    """Run one call sequence, in the implementation's process."""
    from kvref_conformance.fuzz.hypothesis_runner import run_bytes
    from kvref_conformance.fuzz.state_coverage import way_of  # slow to import, because of Hypothesis

    search = Search(judge.implementation, judge.patience, watchers=judge.watchers)
    with time_limit(BOUNDLESS), memory_limit():
        taken = run_bytes(asked.family, search, drawn(asked.seed), STEPS)
    found = next(iter(search.findings.values()), None)
    right = found.conversation[:-1] if found else search.longest
    states, transitions = way_of(asked.family, right, ModelRunner.of(judge.implementation))
    calls = len(right) + (found is not None)
    return UnitResult(asked, calls, taken, frozenset(states), frozenset(transitions), found, search.through)


def checks_of(family: str) -> list[int]:
    """The indices in all_checks() of a family's checks, including checks at production sizes, without slow ones."""
    return [place for place, check in enumerate(all_checks()) if check.family == family and check.run and not check.slow]


def _asked(asked: WorkUnit) -> tuple[int, int]:
    """The index and the seed of a unit's check: its number counts through all checks with seed 0, then with seed 1, and so on."""
    places = checks_of(asked.family)
    seed, at = divmod(int(asked.seed), len(places))
    return places[at], seed


def _check(judge: SubprocessRunner, asked: WorkUnit) -> UnitResult:
    place, seed = _asked(asked)
    check = all_checks()[place]
    judge.effort = replace(judge.effort, seed=seed)
    through: Sequence[str] = ()
    try:
        said, calls = judge.run(_checked, place, seed)
    except RunEnded as ended:
        held, calls = ReplayResult(ended.conversation, ended.broken), len(ended.conversation)
    else:
        if isinstance(said, CheckResult):
            return UnitResult(asked, calls)
        held, through = said
    assert held.broken
    if check.clause == "LAW-18":  # arrays of production sizes are not sent to the main process
        return _failed(judge, asked, Failure(check, held.conversation, held.broken, through), calls)
    return UnitResult(asked, calls, found=FuzzFailure(check.clause, held.conversation, held.broken), through=through)


def _checked(judge: CheckRunner, place: int, seed: int) -> tuple[CheckResult | tuple[ReplayResult, Sequence[str]], int]:
    judge.effort = replace(judge.effort, seed=seed)
    return _counting(judge, checked, place)


def _soak(judge: SubprocessRunner, asked: WorkUnit) -> UnitResult:
    check = Check("LAW-18", asked.family, a_serving_workload)
    try:
        soaked, calls = judge.run(_counting, soak, asked.family, int(asked.seed), SECONDS, EVENTS)
    except RunEnded as ended:  # only the last call of a soak is recorded
        return _failed(judge, asked, Failure(check, ended.conversation, ended.broken), len(ended.conversation))
    held = soaked.held
    if held is None or held.broken is None:
        return UnitResult(asked, calls)
    return _failed(judge, asked, Failure(check, held.conversation, held.broken), calls)


def _failed(judge: SubprocessRunner, asked: WorkUnit, failure: Failure, calls: int) -> UnitResult:
    """The result of a failed check or soak. Its shape is the name of the check."""
    outcome = judge.shown(failure)
    return UnitResult(asked, calls, failed=UnitFailure(asked, failure.check.clause, (failure.check.name,), outcome))


def _counting(judge: CheckRunner, work: Callable[..., T], *about: Any) -> tuple[T, int]:
    """Return work(judge, *about), and the number of calls that it made."""
    calls = 0

    def count(subject: Subject, exchange: Exchange) -> None:
        nonlocal calls
        calls += 1

    judge.watchers.append(count)
    try:
        return work(judge, *about), calls
    finally:
        judge.watchers.remove(count)
