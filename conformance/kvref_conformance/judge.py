"""One clause, one implementation, one verdict."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from kvref_conformance.checking.expect import Broken
from kvref_conformance.checking.registry import Check, all_checks
from kvref_conformance.clauses import Clause, all_clauses
from kvref_conformance.drivers.in_process import NotOffered, Subject
from kvref_conformance.interface import Implementation

Verdict = Literal["passed", "failed", "not offered", "not run"]

SHOWN_CALLS = 8  # lines of them before a failure


@dataclass(frozen=True)
class Outcome:
    """What one check said. `what`, `expected` and `got` are empty unless it failed; `missing` unless it was not offered."""

    check: str
    verdict: Verdict
    what: str = ""
    expected: str = ""
    got: str = ""
    missing: str = ""
    calls: list[str] = field(default_factory=list)


def run_check(check: Check, implementation: Implementation, seed: int) -> Outcome:
    """Never raises for what the implementation does; a check that itself fails with an error counts against it too."""
    subject = Subject(implementation, np.random.default_rng([seed, check.seed]))
    try:
        check.run(subject)
    except NotOffered as missing:
        return Outcome(check.name, "not offered", missing=str(missing))
    except Broken as broken:
        what = broken.what or _last_call(subject)
        return Outcome(check.name, "failed", what, broken.expected, broken.got, calls=_shown(subject.calls))
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        return Outcome(check.name, "failed", _last_call(subject), "no error", got, calls=_shown(subject.calls))
    return Outcome(check.name, "passed")


def _last_call(subject: Subject) -> str:
    return subject.calls[-1].partition("(")[0].rpartition(" ")[2] if subject.calls else "the check"


def _shown(calls: list[str]) -> list[str]:
    """What was made first, and the calls that led to the failure."""
    return calls if len(calls) <= SHOWN_CALLS else [calls[0], "...", *calls[2 - SHOWN_CALLS :]]


def verdict_of(outcomes: Iterable[Outcome]) -> Verdict:
    """A clause fails with any of its checks, and passes with what is offered."""
    verdicts = {outcome.verdict for outcome in outcomes}
    order: tuple[Verdict, ...] = ("failed", "passed", "not run")
    return next((verdict for verdict in order if verdict in verdicts), "not offered")


def run_clause(checks: Iterable[Check], implementation: Implementation, seed: int, slow: bool) -> list[Outcome]:
    outcomes = []
    for check in checks:
        left_out = check.slow and not slow and hasattr(implementation, check.family)
        outcomes.append(Outcome(check.name, "not run", missing="--slow") if left_out else run_check(check, implementation, seed))
    return outcomes


def select(clause_glob: str = "*", family: str | None = None) -> dict[Clause, list[Check]]:
    """The clauses whose id matches, with their checks of the family, in the order of the specification."""
    chosen: dict[Clause, list[Check]] = {}
    for clause in all_clauses().values():
        if fnmatchcase(clause.id, clause_glob.upper()):
            checks = [each for each in all_checks() if each.clause == clause.id and family in (None, each.family)]
            if checks:
                chosen[clause] = checks
    return chosen
