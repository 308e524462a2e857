"""The judge: runs the checks of a clause against one implementation, and reduces each failure to a minimal reproducer."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from kvref_conformance.calls import interrupts
from kvref_conformance.calls.messages import CallRequest, Exchange, error_of, show_calls
from kvref_conformance.calls.provenance import whose
from kvref_conformance.calls.source_location import raised_at
from kvref_conformance.calls.subject import Subject
from kvref_conformance.clauses import Clause, all_clauses, near, spec
from kvref_conformance.drivers.resource_limits import BOUNDLESS, MEMORY, SLOW_MEMORY, Patience, memory_limit, time_limit
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.findings import SHRINKING, Search, size
from kvref_conformance.implementation_api import Implementation, offers
from kvref_conformance.implementations import end
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.outcome import Broken, CannotRun, CheckResult, Died, Hung, NotOffered, Verdict
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.format import Header, judged_by_model, too_large, who, without_arrays, written
from kvref_conformance.traces.shrinking import SECONDS, ReplayResult, hold, shrink

T = TypeVar("T")
SHOWN_CALLS = 8  # lines of calls that a failure shows


@dataclass(frozen=True)
class Failure:
    """A failed check, with the calls up to the failure. It is not shrunk yet."""

    check: Check
    conversation: list[Exchange]
    broken: Broken
    through: Sequence[str] = ()  # the derived operations that were used

    @property
    def what(self) -> str:
        """The observed thing: see Broken.what."""
        return _what(self.broken, self.conversation)


class RunEnded(Exception):
    """The process of an implementation ended, or hangs permanently. conversation: the calls up to then."""

    def __init__(self, conversation: list[Exchange], broken: Hung) -> None:
        super().__init__(str(broken))
        self.conversation, self.broken = conversation, broken


class CheckRunner:
    """Judges one implementation during one run. The state machine of a family runs once, for all clauses of the family."""

    deaths = 60  # how many processes may end while one call trace is shrunk

    def __init__(self, implementation: Implementation, effort: Effort | None = None, name: str = "") -> None:
        """name: the name by which the user selected the implementation, and by which it can be loaded again."""
        self.implementation = implementation
        self.effort = effort or Effort()
        self.name = name or implementation.name
        self.patience = Patience(self.effort.timeout)
        self.watchers: list[Callable[[Subject, Exchange], None]] = []  # see each request before the call
        self.progress: Callable[[str, int, int], None] = lambda family, done, of: None  # how many call sequences were tried
        self.elsewhere: Callable[[Check], CheckResult | Failure] | None = None  # runs a check in another process, if set
        self._searches: dict[str, Search] = {}

    def clause(self, checks: Sequence[Check]) -> list[CheckResult]:
        """The outcome of each check of a clause; one failure has its trace. Does not raise errors of the implementation."""
        said = [self.ask_about(check) for check in checks]
        failures = [each for each in said if isinstance(each, Failure)]
        # Prefer the state machine's failure: its model names the clause that the wrong reply breaks, while a check can also
        # fail because of another clause.
        shown = min(failures, key=lambda failure: (failure.check.run is not None, size(failure.conversation)), default=None)
        outcomes = [self._failed(each, each is shown) if isinstance(each, Failure) else each for each in said]
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
        end(self.implementation)

    def ask_about(self, check: Check) -> "CheckResult | Failure":
        """Run one check. A failure is returned unshrunk."""
        if not offers(self.implementation, check.family):
            return CheckResult(check.name, "not offered", missing=f"family {check.family}")
        if not self.effort.runs(check.option):
            return CheckResult(check.name, "not run", missing=check.option)
        if self.elsewhere:
            return self.elsewhere(check)
        return self._searched(check) if check.run is None else self.checked(check)

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

    def shown(self, failure: "Failure") -> CheckResult:
        """The outcome of a failure, with the shrunk call trace."""
        return self._failed(failure, shown=True)

    def checked(self, check: Check) -> "CheckResult | Failure":
        """Run one check that is a function."""
        subject = self.begin(check)
        assert check.run is not None
        try:
            with time_limit(BOUNDLESS), memory_limit(SLOW_MEMORY if check.slow else MEMORY):
                check.run(subject)
        except NotOffered as missing:
            return CheckResult(check.name, "not offered", missing=" ".join(str(missing).split()) or "no reason given")
        except Broken as broken:
            return Failure(check, subject.conversation, broken, through_of(subject))
        except Exception as error:  # the implementation raised, or returned a result that the check cannot process
            got = f"{type(error).__name__}: {error_of(error).message}"
            unlooked = Broken("", "no error", got, where=raised_at(error))
            return Failure(check, subject.conversation, unlooked, through_of(subject))
        return self._passed(check, subject.conversation, through_of(subject))

    def _searched(self, check: Check) -> "CheckResult | Failure":
        search = self.search(check.family)
        if finding := search.findings.get(check.clause):
            return Failure(check, finding.conversation, finding.broken, search.through)
        return self._passed(check, search.longest, search.through)

    def search(self, family: str) -> Search:
        """The findings of the family's state machine, which runs at the first call."""
        if family not in self._searches:
            from kvref_conformance.fuzz.hypothesis_runner import run_machine  # slow to import, and many processes do not need it

            of = self.effort.sequences
            runs_after = SHRINKING if self.effort.simpler else 0
            search = Search(self.implementation, self.patience, runs_after, watchers=self.watchers)
            search.tell = lambda begun: self.progress(family, min(begun - 1, of), of)
            with time_limit(BOUNDLESS), memory_limit():
                run_machine(family, search, self.effort.seed, of, self.effort.steps)
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

    def _failed(self, failure: "Failure", shown: bool) -> CheckResult:
        """The outcome of a failure. shown: whether to shrink it and to include its calls and trace."""
        check, conversation, broken = failure.check, failure.conversation, failure.broken
        try:
            smaller = self._smaller(conversation, broken, check.clause) if shown else None
        except KeyboardInterrupt:
            if not interrupts.asked:
                raise
            smaller = None  # the failure is reported unshrunk, and then the run ends
        if smaller:
            conversation, broken = smaller
            if found := whose(broken.row, conversation):
                broken.got = f"{broken.got}, {found}"
        calls = shown_calls(show_calls(conversation)) if shown else []
        cause = self._cause(check.family, conversation, again=smaller is not None) if shown and conversation else ""
        said = {"what": _what(broken, conversation), "expected": broken.expected, "got": broken.got}
        said |= {"cause": cause} if cause else {}
        where = broken.where or _raised_at(conversation, broken)
        # A failure that a replay does not reproduce needs the check itself, which compares memory or uses threads.
        judge = "model" if smaller and not too_large(conversation) else "check"
        trace = self._trace(check, conversation, judge, said) if shown else []
        what, through = _what(broken, conversation), list(failure.through)
        return CheckResult(check.name, "failed", what, broken.expected, broken.got, where, "", calls, trace, through, cause)

    def _cause(self, family: str, conversation: list[Exchange], again: bool) -> str:
        if too_large(conversation):
            return ""
        try:
            return self.run(caused, family, conversation, again)
        except RunEnded:
            return ""

    def hold(self, requests: list[CallRequest], seconds: float = float("inf")) -> ReplayResult:
        """Replay requests on new objects, for at most `seconds`. Raises UnknownObject if no model covers a request."""
        with memory_limit(), np.errstate(all="ignore"):
            return hold(self.begin(), requests, seconds)

    def _smaller(self, conversation: list[Exchange], broken: Broken, clause: str) -> tuple[list[Exchange], Broken] | None:
        if isinstance(broken, Hung) and not isinstance(broken, Died):
            return None  # each attempt would hang as long
        deaths, until = 0, time.monotonic() + SECONDS

        def holding(requests: list[CallRequest]) -> ReplayResult:
            nonlocal deaths
            if deaths >= self.deaths:
                return ReplayResult([])
            held = self.hold(requests, until - time.monotonic())
            deaths += isinstance(held.broken, Died)
            return held

        return shrink(conversation, broken.clause or clause, holding)

    def _passed(self, check: Check, conversation: list[Exchange], through: Sequence[str]) -> CheckResult:
        if not self.effort.keep:
            return CheckResult(check.name, "passed", through=list(through))
        plain = not too_large(conversation) and judged_by_model(conversation, ModelRunner.of(self.implementation))
        judge = "model" if plain else "check"
        return CheckResult(check.name, "passed", trace=self._trace(check, conversation, judge), through=list(through))

    def _trace(self, check: Check, conversation: list[Exchange], judge: str, failed: dict[str, str] | None = None) -> list[str]:
        header = Header(check.clause, check.name, judge, who(self.implementation, self.name), self.effort.seed, failed)
        kept = without_arrays(conversation) if too_large(conversation) else conversation
        return written(header, ModelRunner.of(self.implementation), kept)


def through_of(subject: Subject) -> list[str]:
    """The derived operations that were used, sorted by name."""
    return sorted(subject.through.values())


def caused(judge: CheckRunner, family: str, conversation: list[Exchange], again: bool) -> str:
    """The likely cause of a failure, as a sentence; "" if the family cannot determine one.

    conversation: the calls that show the failure. again: whether a replay reproduces it.
    """
    part = all_families()[family].part("diagnosis")
    with memory_limit(), np.errstate(all="ignore"):
        return part.cause(judge.begin_family(family), conversation, again) if part else ""


def _what(broken: Broken, conversation: list[Exchange]) -> str:
    return broken.what or (conversation[-1].request.op if conversation else "the check")


def _raised_at(conversation: list[Exchange], broken: Broken) -> str:
    """The source line that raised the unexpected error of the last call, or ""."""
    last = conversation[-1].reply if conversation else None
    return last.error.where if last and last.error and broken.got.startswith(f"{last.error.kind}: ") else ""


def shown_calls(calls: list[str]) -> list[str]:
    """The first call, which makes the object, and the last calls before the failure; at most SHOWN_CALLS lines."""
    if len(calls) <= SHOWN_CALLS:
        return calls
    last = calls[2 - SHOWN_CALLS :]
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


def through(checks: Sequence[Check], outcomes: Sequence[CheckResult]) -> list[str]:
    """The derived operations on which the verdict of a clause depends.

    A state machine uses all operations that it can, so its derived operations count only if it failed.
    """
    judged = [
        outcome
        for check, outcome in zip(checks, outcomes, strict=True)
        if outcome.verdict == "failed" or (outcome.verdict == "passed" and check.run)
    ]
    return sorted({way for outcome in judged for way in outcome.through})


def select(wanted: str = "*", family: str | None = None) -> dict[Clause, list[Check]]:
    """The selected clauses with their checks, in the order of the specification.

    wanted: clause ids or patterns, separated by commas ("PAGED-07", "FMT-*,BLOCK-05"). family: only checks of this family.
    Raises CannotRun if a pattern matches no clause, or none of its clauses has a check in the family.
    """
    checks: dict[str, list[Check]] = {}
    for each in all_checks():
        checks.setdefault(each.clause, []).append(each)
    chosen = dict[str, list[Check]]()
    for glob in (part.strip() for part in wanted.split(",")):
        named = [clause for clause in all_clauses() if fnmatchcase(clause, glob.upper())]
        if not named:
            raise CannotRun(f"{glob}: no clause matches{near(glob, [f'{chapter.code}-*' for chapter in spec()])}")
        found = {clause: [each for each in checks[clause] if family in (None, each.family)] for clause in named}
        if not any(found.values()):
            families = dict.fromkeys(each.family for clause in named for each in checks[clause])
            raise CannotRun(f"{glob}: no check in family {family}, only in {', '.join(families)}")
        chosen |= {clause: of_family for clause, of_family in found.items() if of_family}
    return {clause: chosen[id] for id, clause in all_clauses().items() if id in chosen}
