"""Judges the members of the zoo: does the clause that a member names detect its bug? Used by `kvref zoo` and the tests."""

from dataclasses import dataclass

import kvref_zoo
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import offers
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check
from kvref_zoo.mutant import Mutant

CALL_TIMEOUT = 1.0  # seconds: some members hang


@dataclass(frozen=True)
class ZooResult:
    """The result for one member. failed: the failed outcomes of its clause, empty if the bug was not detected."""

    member: Mutant
    failed: list[CheckResult]

    @property
    def detected_by(self) -> str:
        """What detected the bug: a hand-written check ("check"), the state machine ("search"), or "both"."""
        searched = {outcome.check.startswith("any ") for outcome in self.failed}
        return "both" if len(searched) == 2 else "search" if True in searched else "check"

    @property
    def shortest(self) -> CheckResult:
        return next(outcome for outcome in self.failed if outcome.trace)


def make_member_runner(member: Mutant, examples: int, simpler: bool = True) -> CheckRunner:
    return CheckRunner(member, Effort(examples=examples, timeout=CALL_TIMEOUT, shrinks=simpler), member.name)


def judge_member(name: str, examples: int = 100) -> ZooResult:
    """Judge one member by the clause that it names. examples: number of call sequences."""
    member = kvref_zoo.member(name)
    judge = make_member_runner(member, examples)
    ((_, checks),) = select_checks(member.clause).items()
    return ZooResult(member, [outcome for outcome in judge.judge_clause(checks) if outcome.verdict == "failed"])


def clauses_broken_by(name: str, wanted: str = "*", examples: int = 100) -> set[str]:
    """The wanted clauses that a member breaks, as its failures name them.

    Without LAW-18: a bug that shows at small sizes also breaks LAW-18. Without failures of a check that name another clause.
    """
    member = kvref_zoo.member(name)
    judge = make_member_runner(member, examples, simpler=False)
    offered = {family for family in families() if offers(member, family)}
    clauses = {clause: checks for clause, checks in select_checks(wanted).items() if {check.family for check in checks} & offered}

    def breaks(clause: str, check: Check) -> bool:
        said = judge.judge_check(check)
        return isinstance(said, Failure) and said.violation.clause in ("", clause)

    return {
        clause.id
        for clause, checks in clauses.items()
        if clause.id != "LAW-18" and any(breaks(clause.id, each) for each in checks)
    }
