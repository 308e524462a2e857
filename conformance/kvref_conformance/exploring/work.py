"""The tasks of a worker process: functions that take the worker's judge and return a result to the main process.

The worker runs the implementation in another process (`judging.isolated`). If that process ends or hangs, the worker reports it.
If the worker is killed, that process finds its pipe closed and ends too.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvref_conformance.checking.registry import Check, all_checks
from kvref_conformance.conversation.drivers.guard import BOUNDLESS, memory_limit, time_limit
from kvref_conformance.conversation.exchange import Exchange
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.conversation.trace.file import parsed
from kvref_conformance.conversation.trace.shrink import Held
from kvref_conformance.exploring.seen import Failed, Seen, Shape, shape_of
from kvref_conformance.exploring.units import Unit, drawn
from kvref_conformance.judging.asked import Effort
from kvref_conformance.judging.isolated import IsolatedJudge
from kvref_conformance.judging.isolated_child import checked
from kvref_conformance.judging.judge import Ended, Failure, Judge
from kvref_conformance.judging.replay import replay
from kvref_conformance.oracle.witness import Unknown, Witness
from kvref_conformance.outcome import NotOffered, Outcome
from kvref_conformance.searching.found import Finding, Search
from kvref_conformance.soak.run import a_serving_workload, soak

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
        _own.judge, _own.asked = IsolatedJudge(name, Effort(timeout=timeout, real=True), beside_others=True), asked
    return work(_own.judge, *about)


def ready(judge: IsolatedJudge) -> None:
    """Import slow modules in advance."""
    judge.run(_imported)


def _imported(judge: Judge) -> None:
    from kvref_conformance.searching import met, run  # noqa: F401 - imported for later tasks


def units(judge: IsolatedJudge, asked: Sequence[Unit]) -> list[Seen]:
    """Run units in order."""
    return [unit(judge, each) for each in asked]


def unit(judge: IsolatedJudge, asked: Unit) -> Seen:
    """Run one unit."""
    return {"calls": _calls, "check": _check, "soak": _soak}[asked.kind](judge, asked)


def shrunk(judge: IsolatedJudge, seen: Seen) -> Failed:
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
    return Failed(seen.unit, check.clause, shape, outcome)


@dataclass(frozen=True)
class Again:
    """Whether a failure of an earlier run still occurs. why: what is not offered any more."""

    still: Literal["broken", "mended", "not offered"]
    why: str = ""


def again(judge: IsolatedJudge, clause: str, asked: Unit, trace: Sequence[str]) -> Again:
    """Replay the trace of a failure. If it has none, or if only its check can show it, run its unit again."""
    try:
        if trace and (read := parsed(Path("trace"), list(trace))).header.judge == "model":
            return Again("mended" if replay(read, judge).parted_at is None else "broken")
        seen = unit(judge, asked)
    except (NotOffered, Unknown) as lacking:
        return Again("not offered", str(lacking))
    clauses = {each.clause for each in (seen.found, seen.failed) if each}
    return Again("broken" if clause in clauses else "mended")


def _calls(judge: IsolatedJudge, asked: Unit) -> Seen:
    try:
        return judge.run(_explored, asked)
    except Ended as ended:
        found = Finding(ended.broken.clause or "LAW-01", ended.conversation, ended.broken)
        return Seen(asked, len(ended.conversation), found=found)


def _explored(judge: Judge, asked: Unit) -> Seen:
    """Run one call sequence, in the implementation's process."""
    from kvref_conformance.searching.met import way_of  # slow to import, because of Hypothesis
    from kvref_conformance.searching.run import run_bytes

    search = Search(judge.implementation, judge.patience, watchers=judge.watchers)
    with time_limit(BOUNDLESS), memory_limit():
        taken = run_bytes(asked.family, search, drawn(asked.seed), STEPS)
    found = next(iter(search.findings.values()), None)
    right = found.conversation[:-1] if found else search.longest
    states, transitions = way_of(asked.family, right, Witness.of(judge.implementation))
    calls = len(right) + (found is not None)
    return Seen(asked, calls, taken, frozenset(states), frozenset(transitions), found, search.through)


def checks_of(family: str) -> list[int]:
    """The indices in all_checks() of a family's checks, including checks at production sizes, without slow ones."""
    return [place for place, check in enumerate(all_checks()) if check.family == family and check.run and not check.slow]


def _asked(asked: Unit) -> tuple[int, int]:
    """The index and the seed of a unit's check: its number counts through all checks with seed 0, then with seed 1, and so on."""
    places = checks_of(asked.family)
    seed, at = divmod(int(asked.seed), len(places))
    return places[at], seed


def _check(judge: IsolatedJudge, asked: Unit) -> Seen:
    place, seed = _asked(asked)
    check = all_checks()[place]
    judge.effort = replace(judge.effort, seed=seed)
    through: Sequence[str] = ()
    try:
        said, calls = judge.run(_checked, place, seed)
    except Ended as ended:
        held, calls = Held(ended.conversation, ended.broken), len(ended.conversation)
    else:
        if isinstance(said, Outcome):
            return Seen(asked, calls)
        held, through = said
    assert held.broken
    if check.clause == "LAW-18":  # arrays of production sizes are not sent to the main process
        return _failed(judge, asked, Failure(check, held.conversation, held.broken, through), calls)
    return Seen(asked, calls, found=Finding(check.clause, held.conversation, held.broken), through=through)


def _checked(judge: Judge, place: int, seed: int) -> tuple[Outcome | tuple[Held, Sequence[str]], int]:
    judge.effort = replace(judge.effort, seed=seed)
    return _counting(judge, checked, place)


def _soak(judge: IsolatedJudge, asked: Unit) -> Seen:
    check = Check("LAW-18", asked.family, a_serving_workload)
    try:
        soaked, calls = judge.run(_counting, soak, asked.family, int(asked.seed), SECONDS, EVENTS)
    except Ended as ended:  # only the last call of a soak is recorded
        return _failed(judge, asked, Failure(check, ended.conversation, ended.broken), len(ended.conversation))
    held = soaked.held
    if held is None or held.broken is None:
        return Seen(asked, calls)
    return _failed(judge, asked, Failure(check, held.conversation, held.broken), calls)


def _failed(judge: IsolatedJudge, asked: Unit, failure: Failure, calls: int) -> Seen:
    """The result of a failed check or soak. Its shape is the name of the check."""
    outcome = judge.shown(failure)
    return Seen(asked, calls, failed=Failed(asked, failure.check.clause, (failure.check.name,), outcome))


def _counting(judge: Judge, work: Callable[..., T], *about: Any) -> tuple[T, int]:
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
