"""The judge: runs the checks of a clause against one implementation, and reduces each failure to a minimal reproducer."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from kvref_conformance.calls import interrupts
from kvref_conformance.calls.messages import CallRequest, Exchange, format_calls, to_call_error
from kvref_conformance.calls.provenance import find_source_of_row
from kvref_conformance.calls.source_location import raised_at
from kvref_conformance.calls.subject import Subject
from kvref_conformance.clauses import Clause, all_clauses, spec, suggest_clause
from kvref_conformance.drivers.resource_limits import (
    MEMORY_LIMIT,
    NO_TIMEOUT,
    SLOW_MEMORY_LIMIT,
    CallTimeouts,
    memory_limit,
    time_limit,
)
from kvref_conformance.exceptions import CallTimeout, CannotRun, ClauseViolation, NotOffered, ProcessDeath
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.findings import SHRINK_CALLS, Search, trace_size
from kvref_conformance.implementation_api import Implementation, offers
from kvref_conformance.implementations import close_implementation
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.results import CheckResult, Evidence, Result, Verdict
from kvref_conformance.runner.causes import failure_kind
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.format import (
    Header,
    describe_implementation,
    exceeds_array_limit,
    judged_by_model,
    trace_lines,
    without_arrays,
)
from kvref_conformance.traces.shape import shape_of_exchanges
from kvref_conformance.traces.shrinking import (
    LONG_REPLAY_SECONDS,
    LONG_TRACE,
    SHRINK_SECONDS,
    ReplayResult,
    replay_requests,
    shrink_trace,
)

T = TypeVar("T")
MAX_SHOWN_CALLS = 8  # lines of calls that a failure shows
MAX_SHAPE_CALLS = 100  # a longer reproducer is not compared with others


@dataclass(frozen=True)
class Failure:
    """A failed check, with the calls up to the failure. It is not shrunk yet."""

    check: Check
    call_trace: list[Exchange]
    violation: ClauseViolation
    derivations_used: Sequence[str] = ()  # the derived operations that were used

    @property
    def what(self) -> str:
        """The observed thing: see ClauseViolation.what."""
        return _describe_violation(self.violation, self.call_trace)


class RunEnded(Exception):
    """The process of an implementation ended, or hangs permanently. call_trace: the calls up to then."""

    def __init__(self, call_trace: list[Exchange], broken: CallTimeout) -> None:
        super().__init__(str(broken))
        self.call_trace, self.violation = call_trace, broken


class CheckRunner:
    """Judges one implementation during one run. The state machine of a family runs once, for all clauses of the family."""

    max_deaths = 60  # how many processes may end while one call trace is shrunk

    def __init__(self, implementation: Implementation, effort: Effort | None = None, name: str = "") -> None:
        """name: the name by which the user selected the implementation, and by which it can be loaded again."""
        self.implementation = implementation
        self.effort = effort or Effort()
        self.name = name or implementation.name
        self.patience = CallTimeouts(self.effort.timeout)
        self.watchers: list[Callable[[Subject, Exchange], None]] = []  # see each request before the call
        self.progress: Callable[[str, int, int], None] = lambda family, done, of: None  # how many call sequences were tried
        self.runs_elsewhere: Callable[[Check], CheckResult | Failure] | None = None  # runs a check in another process, if set
        self._searches: dict[str, Search] = {}

    def judge_clause(self, checks: Sequence[Check]) -> list[CheckResult]:
        """The outcome of each check of a clause. Does not raise errors of the implementation.

        Of the failures of one kind (see `failure_kind`), one has its calls, its trace and its evidence.
        """
        said = [self.judge_check(check) for check in checks]
        failures = [each for each in said if isinstance(each, Failure)]
        # Prefer the state machine's failure: its model names the clause that the wrong reply breaks, while a check can also
        # fail because of another clause.
        failures.sort(key=lambda failure: (failure.check.run is not None, trace_size(failure.call_trace)))
        shown: dict[str, Failure] = {}
        for failure in failures:
            shown.setdefault(failure_kind(failure.violation, failure.call_trace), failure)
        outcomes = [
            self._failed_result(each, any(each is one for one in shown.values())) if isinstance(each, Failure) else each
            for each in said
        ]
        if any(check.run and outcome.verdict in ("passed", "failed") for check, outcome in zip(checks, outcomes, strict=True)):
            return outcomes
        # A state machine that found nothing may not have exercised this clause. Its outcome is that of the family's checks.
        written = {check.family: outcome for check, outcome in zip(checks, outcomes, strict=True) if check.run}
        return [
            replace(outcome, verdict=written[check.family].verdict, missing=written[check.family].missing, through=[])
            if outcome.verdict == "passed"
            else outcome
            for check, outcome in zip(checks, outcomes, strict=True)
        ]

    def missing(self, checks: Sequence[Check], outcomes: Sequence[CheckResult]) -> list[str]:
        """Why checks of a clause did not run: what is missing in the offered families, or else the families that are missing."""
        left = [(check, each) for check, each in zip(checks, outcomes, strict=True) if each.missing]
        if verdict_of(outcomes) == "not offered":
            left = [(check, each) for check, each in left if each.verdict == "not offered"]  # without options such as --slow
        lacking = [(check.family, each.missing) for check, each in left]
        own = [missing for family, missing in lacking if offers(self.implementation, family)]
        return list(dict.fromkeys(own or [missing for _, missing in lacking]))

    def close(self) -> None:
        """End the implementation's processes and connections."""
        close_implementation(self.implementation)

    def judge_check(self, check: Check) -> "CheckResult | Failure":
        """Run one check. A failure is returned unshrunk."""
        if not offers(self.implementation, check.family):
            return CheckResult(check.name, "not offered", missing=f"family {check.family}")
        if not self.effort.includes(check.option):
            return CheckResult(check.name, "not run", missing=check.option)
        if self.runs_elsewhere:
            return self.runs_elsewhere(check)
        return self._judge_by_search(check) if check.run is None else self.run_check(check)

    def begin(self, check: Check | None = None) -> Subject:
        """A new Subject, for one check."""
        rng = np.random.default_rng([self.effort.seed, check.seed if check else 0])
        about = (check.family, check.clause) if check else ()
        subject = Subject(self.implementation, rng, self.patience, *about)
        subject.watchers += self.watchers
        return subject

    def begin_family(self, family: str) -> Subject:
        """A new Subject for one family, for calls outside of checks."""
        subject = Subject(self.implementation, np.random.default_rng(self.effort.seed), self.patience, family)
        subject.watchers += self.watchers
        return subject

    def shrink_failure(self, failure: "Failure") -> CheckResult:
        """The outcome of a failure, with the shrunk call trace."""
        return self._failed_result(failure, shown=True)

    def run_check(self, check: Check) -> "CheckResult | Failure":
        """Run one check that is a function."""
        subject = self.begin(check)
        assert check.run is not None
        try:
            with time_limit(NO_TIMEOUT), memory_limit(SLOW_MEMORY_LIMIT if check.slow else MEMORY_LIMIT):
                check.run(subject)
        except NotOffered as missing:
            return CheckResult(check.name, "not offered", missing=" ".join(str(missing).split()) or "no reason given")
        except ClauseViolation as violation:
            return Failure(check, subject.call_trace, violation, used_derivations(subject))
        except Exception as error:  # the implementation raised, or returned a result that the check cannot process
            got = f"{type(error).__name__}: {to_call_error(error).message}"
            unlooked = ClauseViolation("", "no error", got, where=raised_at(error))
            return Failure(check, subject.call_trace, unlooked, used_derivations(subject))
        return self._passed_result(check, subject.call_trace, used_derivations(subject))

    def _judge_by_search(self, check: Check) -> "CheckResult | Failure":
        search = self.search(check.family)
        if finding := search.findings.get(check.clause):
            return Failure(check, finding.call_trace, finding.violation, search.through)
        return self._passed_result(check, search.longest, search.through)

    def search(self, family: str) -> Search:
        """The findings of the family's state machine, which runs at the first call."""
        if family not in self._searches:
            from kvref_conformance.fuzz.hypothesis_runner import run_machine  # slow to import, and many processes do not need it

            of = self.effort.num_sequences
            calls_after = SHRINK_CALLS if self.effort.shrinks else 0
            search = Search(self.implementation, self.patience, calls_after, watchers=self.watchers)
            search.on_begin = lambda begun: self.progress(family, min(begun - 1, of), of)
            with time_limit(NO_TIMEOUT), memory_limit():
                run_machine(family, search, self.effort.seed, of, self.effort.max_steps)
            self.progress(family, of, of)
            strays = set(search.findings) - set(all_families()[family].speaks_for)
            assert not strays, f"the model of {family} names clauses that speaks_for lacks: {strays}"
            self._searches[family] = search
        return self._searches[family]

    def run(self, work: Callable[..., T], *about: Any) -> T:
        """Return work(judge, *about), called in the process in which the implementation runs.

        CannotRun, NotOffered and UnknownObject that `work` raises are raised here. Raises RunEnded if the process ended or hangs.
        """
        return work(self, *about)

    def _failed_result(self, failure: "Failure", shown: bool) -> CheckResult:
        """The outcome of a failure. shown: whether to shrink it and to include its calls and trace."""
        check, call_trace, violation = failure.check, failure.call_trace, failure.violation
        try:
            smaller = self._shrink(call_trace, violation, check.clause) if shown else None
        except KeyboardInterrupt:
            if not interrupts.interrupted:
                raise
            smaller = None  # the failure is reported unshrunk, and then the run ends
        if smaller:
            call_trace, violation = smaller
            if found := find_source_of_row(violation.row, call_trace):
                violation.got = f"{violation.got}, {found}"
        calls = shorten_calls(format_calls(call_trace)) if shown else []
        cause = self._diagnose(check.family, call_trace, again=smaller is not None) if shown and call_trace else ""
        said = {"what": _describe_violation(violation, call_trace), "expected": violation.expected, "got": violation.got}
        said |= {"cause": cause} if cause else {}
        where = violation.where or _raised_at(call_trace, violation)
        # A failure that a replay does not reproduce needs the check itself, which compares memory or uses threads.
        judge = "model" if smaller and not exceeds_array_limit(call_trace) else "check"
        trace = self._trace_lines(check, call_trace, judge, said) if shown else []
        what, through = _describe_violation(violation, call_trace), list(failure.derivations_used)
        evidence = self._weigh_evidence(call_trace, violation, reproduced=smaller is not None) if shown else None
        return CheckResult(
            check.name, "failed", what, violation.expected, violation.got, where, "", calls, trace, through, cause, evidence
        )

    def _weigh_evidence(self, call_trace: list[Exchange], violation: ClauseViolation, reproduced: bool) -> Evidence:
        calls, all_calls, numbers = trace_size(call_trace)
        kind = failure_kind(violation, call_trace)
        if all_calls > MAX_SHAPE_CALLS:
            return Evidence(calls, numbers, kind=kind)
        root = self._shrink(call_trace, violation, "") if reproduced else None
        shape = shape_of_exchanges(call_trace)
        return Evidence(calls, numbers, shape, *((shape_of_exchanges(root[0]), root[1].clause) if root else ((), "")), kind)

    def _diagnose(self, family: str, call_trace: list[Exchange], again: bool) -> str:
        if exceeds_array_limit(call_trace):
            return ""
        try:
            return self.run(diagnose_cause, family, call_trace, again)
        except RunEnded:
            return ""

    def replay(self, requests: list[CallRequest], seconds: float = float("inf")) -> ReplayResult:
        """Replay requests on new objects, for at most `seconds`. Raises UnknownObject if no model covers a request."""
        with memory_limit(), np.errstate(all="ignore"):
            return replay_requests(self.begin(), requests, seconds)

    def _shrink(
        self, call_trace: list[Exchange], violation: ClauseViolation, clause: str
    ) -> tuple[list[Exchange], ClauseViolation] | None:
        if isinstance(violation, CallTimeout) and not isinstance(violation, ProcessDeath):
            return None  # each attempt would hang as long
        deaths, until = 0, time.monotonic() + SHRINK_SECONDS

        def holding(requests: list[CallRequest]) -> ReplayResult:
            nonlocal deaths
            if deaths >= self.max_deaths:
                return ReplayResult([])
            left = until - time.monotonic()
            result = self.replay(requests, min(LONG_REPLAY_SECONDS, left) if len(requests) > LONG_TRACE else left)
            deaths += isinstance(result.violation, ProcessDeath)
            return result

        return shrink_trace(call_trace, clause and (violation.clause or clause), holding)

    def _passed_result(self, check: Check, call_trace: list[Exchange], through: Sequence[str]) -> CheckResult:
        if not self.effort.keep_traces:
            return CheckResult(check.name, "passed", through=list(through))
        plain = not exceeds_array_limit(call_trace) and judged_by_model(call_trace, ModelRunner.of(self.implementation))
        judge = "model" if plain else "check"
        return CheckResult(check.name, "passed", trace=self._trace_lines(check, call_trace, judge), through=list(through))

    def _trace_lines(
        self, check: Check, call_trace: list[Exchange], judge: str, failed: dict[str, str] | None = None
    ) -> list[str]:
        header = Header(
            check.clause, check.name, judge, describe_implementation(self.implementation, self.name), self.effort.seed, failed
        )
        kept = without_arrays(call_trace) if exceeds_array_limit(call_trace) else call_trace
        return trace_lines(header, ModelRunner.of(self.implementation), kept)


def used_derivations(subject: Subject) -> list[str]:
    """The derived operations that were used, sorted by name."""
    return sorted(subject.derivations_used.values())


def diagnose_cause(judge: CheckRunner, family: str, call_trace: list[Exchange], again: bool) -> str:
    """The likely cause of a failure, as a sentence; "" if the family cannot determine one.

    call_trace: the calls that show the failure. again: whether a replay reproduces it.
    """
    part = all_families()[family].part("diagnosis")
    with memory_limit(), np.errstate(all="ignore"):
        return part.cause(judge.begin_family(family), call_trace, again) if part else ""


def _describe_violation(violation: ClauseViolation, call_trace: list[Exchange]) -> str:
    return violation.what or (call_trace[-1].request.op if call_trace else "the check")


def _raised_at(call_trace: list[Exchange], violation: ClauseViolation) -> str:
    """The source line that raised the unexpected error of the last call, or ""."""
    last = call_trace[-1].reply if call_trace else None
    return last.error.where if last and last.error and violation.got.startswith(f"{last.error.kind}: ") else ""


def shorten_calls(calls: list[str]) -> list[str]:
    """The first call, which makes the object, and the last calls before the failure; at most MAX_SHOWN_CALLS lines."""
    if len(calls) <= MAX_SHOWN_CALLS:
        return calls
    last = calls[2 - MAX_SHOWN_CALLS :]
    return [calls[0], f"... {len(calls) - 1 - len(last)} more calls, which kvref replay shows", *last]


def verdict_of(outcomes: Iterable[CheckResult]) -> Verdict:
    """The verdict of a clause: failed if any check failed, else passed if any check passed, else not offered or not run.

    It is "not run" only if options such as --slow would run a check, and no check of an offered family was found lacking.
    """
    outcomes = list(outcomes)
    verdicts = {outcome.verdict for outcome in outcomes}
    lacking = any(each.verdict == "not offered" and not each.missing.startswith("family ") for each in outcomes)
    order: tuple[Verdict, ...] = ("failed", "passed", "not offered" if lacking else "not run")
    return next((verdict for verdict in order if verdict in verdicts), "not offered")


def clause_result(
    judge: CheckRunner, clause: Clause, checks: Sequence[Check], outcomes: Sequence[CheckResult], reason: str | None
) -> Result:
    """The result of a clause as plain data. reason: why the clause is expected to fail, or None. The traces are not included."""
    verdict: str = verdict_of(outcomes)
    if reason is not None:
        verdict = {"failed": "xfailed", "passed": "xpassed"}.get(verdict, verdict)
    return {
        "clause": clause.id,
        "title": clause.title,
        "chapter": clause.chapter,
        "digest": clause.digest,
        "verdict": verdict,
        "offered": any(offers(judge.implementation, check.family) for check in checks),
        "missing": judge.missing(checks, outcomes),
        "through": derivations_of_verdict(checks, outcomes),
        "reason": reason,
        "shown": None,
        "trace": None,
        "checks": [vars(each) | {"trace": None, "evidence": vars(each.evidence) if each.evidence else None} for each in outcomes],
    }


def derivations_of_verdict(checks: Sequence[Check], outcomes: Sequence[CheckResult]) -> list[str]:
    """The derived operations on which the verdict of a clause depends.

    A state machine uses all operations that it can, so its derived operations count only if it failed.
    """
    judged = [
        outcome
        for check, outcome in zip(checks, outcomes, strict=True)
        if outcome.verdict == "failed" or (outcome.verdict == "passed" and check.run)
    ]
    return sorted({way for outcome in judged for way in outcome.through})


def select_checks(wanted: str = "*", family: str | None = None) -> dict[Clause, list[Check]]:
    """The selected clauses with their checks, in the order of the specification.

    wanted: clause ids or patterns, separated by commas ("PAGED-07", "FMT-*,BLOCK-05"). family: only checks of this family,
    or of several, separated by commas. Raises CannotRun if a pattern matches no clause, or no clause of any pattern has a check
    in the families.
    """
    families = family.split(",") if family else list(all_families())
    checks: dict[str, list[Check]] = {}
    for each in all_checks():
        checks.setdefault(each.clause, []).append(each)
    chosen, elsewhere = dict[str, list[Check]](), dict[str, None]()
    for glob in (part.strip() for part in wanted.split(",")):
        named = [clause for clause in all_clauses() if fnmatchcase(clause, glob.upper())]
        if not named:
            raise CannotRun(f"{glob}: no clause matches{suggest_clause(glob, [f'{chapter.code}-*' for chapter in spec()])}")
        found = {clause: [each for each in checks[clause] if each.family in families] for clause in named}
        chosen |= {clause: of_family for clause, of_family in found.items() if of_family}
        elsewhere |= dict.fromkeys(each.family for clause in named for each in checks[clause])
    if not chosen:
        raise CannotRun(f"{wanted}: no check in family {family}, only in {', '.join(elsewhere)}")
    return {clause: chosen[id] for id, clause in all_clauses().items() if id in chosen}
