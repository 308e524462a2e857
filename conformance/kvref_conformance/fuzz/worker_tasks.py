"""The tasks of a worker process: functions that take the worker's judge and return a result to the main process.

The worker runs the implementation in another process (`runner.subprocess_runner`). If that process ends or hangs, the worker
reports it. If the worker is killed, that process finds its pipe closed and ends too.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import NO_TIMEOUT, memory_limit, time_limit
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.fuzz.findings import FuzzFailure, Search
from kvref_conformance.fuzz.work_unit import UnitFailure, UnitResult, WorkUnit, seed_bytes
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.replay import replay_saved_trace
from kvref_conformance.runner.subprocess_runner import SubprocessRunner
from kvref_conformance.runner.subprocess_worker import run_check
from kvref_conformance.soak.cache_soak import a_serving_workload, run_soak
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.format import parse_trace
from kvref_conformance.traces.shape import Shape, shape_of
from kvref_conformance.traces.shrinking import ReplayResult

MAX_STEPS = 60  # maximum calls per call sequence
SOAK_EVENTS, SOAK_SECONDS = 1000, 60.0  # maximum events and duration of a soak
T = TypeVar("T")
_worker_state = threading.local()  # each thread of a worker has one judge


def run_on_worker(name: str, timeout: float, work: Callable[..., T], *about: Any) -> T:
    """Return work(judge, *about) with this worker's judge of the implementation `name`. Raises CannotRun."""
    asked = name, timeout
    if getattr(_worker_state, "asked", None) != asked:
        if hasattr(_worker_state, "judge"):
            _worker_state.judge.close()
        _worker_state.judge, _worker_state.asked = (
            SubprocessRunner(name, Effort(timeout=timeout, real=True), beside_others=True),
            asked,
        )
    return work(_worker_state.judge, *about)


def import_slow_modules(judge: SubprocessRunner) -> None:
    """Import slow modules in advance."""
    judge.run(_import_in_child)


def _import_in_child(judge: CheckRunner) -> None:
    from kvref_conformance.fuzz import hypothesis_runner, state_coverage  # noqa: F401 - imported for later tasks


def run_units(judge: SubprocessRunner, unit: Sequence[WorkUnit]) -> list[UnitResult]:
    """Run units in order."""
    return [run_unit(judge, each) for each in unit]


def run_unit(judge: SubprocessRunner, unit: WorkUnit) -> UnitResult:
    """Run one unit."""
    return {"calls": _run_sequence, "check": _run_check, "soak": _run_soak}[unit.kind](judge, unit)


def shrink_result(judge: SubprocessRunner, result: UnitResult) -> UnitFailure:
    """Shrink the failure of a result."""
    assert result.fuzz_failure
    machine = result.unit.kind == "calls"
    check = (
        Check(result.fuzz_failure.clause, result.unit.family, None) if machine else all_checks()[_check_of_unit(result.unit)[0]]
    )
    outcome = judge.shrink_failure(
        Failure(check, result.fuzz_failure.call_trace, result.fuzz_failure.violation, result.derivations_used)
    )
    if not machine:
        shape: Shape = (check.name,)
    elif '"judge": "model"' in outcome.trace[0]:
        shape = shape_of(outcome.trace)
    else:  # not shrunk, because a replay does not reproduce it; only its last call is comparable with other failures
        shape = shape_of(outcome.trace)[-1:]
    return UnitFailure(result.unit, check.clause, shape, outcome)


@dataclass(frozen=True)
class RecheckResult:
    """Whether a failure of an earlier run still occurs. why: what is not offered any more."""

    still: Literal["broken", "mended", "not offered"]
    why: str = ""


def recheck_failure(judge: SubprocessRunner, clause: str, unit: WorkUnit, trace: Sequence[str]) -> RecheckResult:
    """Replay the trace of a failure. If it has none, or if only its check can show it, run its unit again."""
    try:
        if trace and (read := parse_trace(Path("trace"), list(trace))).header.judge == "model":
            return RecheckResult("mended" if replay_saved_trace(read, judge).mismatch_line is None else "broken")
        result = run_unit(judge, unit)
    except (NotOffered, UnknownObject) as lacking:
        return RecheckResult("not offered", str(lacking))
    clauses = {each.clause for each in (result.fuzz_failure, result.failure) if each}
    return RecheckResult("broken" if clause in clauses else "mended")


def _run_sequence(judge: SubprocessRunner, unit: WorkUnit) -> UnitResult:
    try:
        return judge.run(_explore, unit)
    except RunEnded as ended:
        found = FuzzFailure(ended.violation.clause or "LAW-01", ended.call_trace, ended.violation)
        return UnitResult(unit, len(ended.call_trace), fuzz_failure=found)


def _explore(judge: CheckRunner, unit: WorkUnit) -> UnitResult:
    """Run one call sequence, in the implementation's process."""
    from kvref_conformance.fuzz.hypothesis_runner import run_bytes
    from kvref_conformance.fuzz.state_coverage import states_and_transitions  # slow to import, because of Hypothesis

    search = Search(judge.implementation, judge.patience, watchers=judge.watchers)
    with time_limit(NO_TIMEOUT), memory_limit():
        taken = run_bytes(unit.family, search, seed_bytes(unit.seed), MAX_STEPS)
    found = next(iter(search.findings.values()), None)
    right = found.call_trace[:-1] if found else search.longest
    states, transitions = states_and_transitions(unit.family, right, ModelRunner.of(judge.implementation))
    calls = len(right) + (found is not None)
    return UnitResult(unit, calls, taken, frozenset(states), frozenset(transitions), found, search.through)


def check_indices(family: str) -> list[int]:
    """The indices in all_checks() of a family's checks, including checks at production sizes, without slow ones."""
    return [place for place, check in enumerate(all_checks()) if check.family == family and check.run and not check.slow]


def _check_of_unit(unit: WorkUnit) -> tuple[int, int]:
    """The index and the seed of a unit's check: its number counts through all checks with seed 0, then with seed 1, and so on."""
    places = check_indices(unit.family)
    seed, at = divmod(int(unit.seed), len(places))
    return places[at], seed


def _run_check(judge: SubprocessRunner, unit: WorkUnit) -> UnitResult:
    place, seed = _check_of_unit(unit)
    check = all_checks()[place]
    judge.effort = replace(judge.effort, seed=seed)
    through: Sequence[str] = ()
    try:
        said, calls = judge.run(_run_indexed_check, place, seed)
    except RunEnded as ended:
        result, calls = ReplayResult(ended.call_trace, ended.violation), len(ended.call_trace)
    else:
        if isinstance(said, CheckResult):
            return UnitResult(unit, calls)
        result, through = said
    assert result.violation
    if check.clause == "LAW-18":  # arrays of production sizes are not sent to the main process
        return _failed_result(judge, unit, Failure(check, result.call_trace, result.violation, through), calls)
    return UnitResult(
        unit, calls, fuzz_failure=FuzzFailure(check.clause, result.call_trace, result.violation), derivations_used=through
    )


def _run_indexed_check(judge: CheckRunner, place: int, seed: int) -> tuple[CheckResult | tuple[ReplayResult, Sequence[str]], int]:
    judge.effort = replace(judge.effort, seed=seed)
    return _count_calls(judge, run_check, place)


def _run_soak(judge: SubprocessRunner, unit: WorkUnit) -> UnitResult:
    check = Check("LAW-18", unit.family, a_serving_workload)
    try:
        soaked, calls = judge.run(_count_calls, run_soak, unit.family, int(unit.seed), SOAK_SECONDS, SOAK_EVENTS)
    except RunEnded as ended:  # only the last call of a soak is recorded
        return _failed_result(judge, unit, Failure(check, ended.call_trace, ended.violation), len(ended.call_trace))
    held = soaked.failure
    if held is None or held.violation is None:
        return UnitResult(unit, calls)
    return _failed_result(judge, unit, Failure(check, held.call_trace, held.violation), calls)


def _failed_result(judge: SubprocessRunner, unit: WorkUnit, failure: Failure, calls: int) -> UnitResult:
    """The result of a failed check or soak. Its shape is the name of the check."""
    outcome = judge.shrink_failure(failure)
    return UnitResult(unit, calls, failure=UnitFailure(unit, failure.check.clause, (failure.check.name,), outcome))


def _count_calls(judge: CheckRunner, work: Callable[..., T], *about: Any) -> tuple[T, int]:
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
