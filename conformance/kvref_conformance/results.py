"""The results of checks."""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not offered", "not run"]
Result = dict[str, Any]  # the result of a clause as plain data, as in results.schema.json


@dataclass(frozen=True)
class Evidence:
    """How directly the reproducer of a failure shows a fault, for comparisons with other failures.

    calls: number of printed calls. numbers: how many numbers their arguments contain. shape: the calls in order, as
    "paged.write", with a "!" if the call raised; empty for a long reproducer. root: the shape of the smallest reproducer that
    breaks any clause, and root_clause: this clause; both empty if a replay does not fail. kind: see `causes.failure_kind`.
    """

    calls: int
    numbers: int
    shape: tuple[str, ...] = ()
    root: tuple[str, ...] = ()
    root_clause: str = ""
    kind: str = "counts"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    what, expected, got: as in ClauseViolation, "" unless the check failed. where: the line of the implementation's code
    that raised the unexpected error or returned the malformed object. missing: the missing thing, "" unless the verdict is
    "not offered". calls: the calls as lines of Python. trace: the call trace, one JSON object per line, if the check failed
    or all traces are kept. through: the derived operations that the check used, as "paged.gather through length and read".
    cause: a sentence about the likely cause of the failure, "" if the family cannot determine one. evidence: None unless the
    check failed and its calls are shown.
    """

    check: str
    verdict: Verdict
    what: str = ""
    expected: str = ""
    got: str = ""
    where: str = ""
    missing: str = ""
    calls: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    through: list[str] = field(default_factory=list)
    cause: str = ""
    evidence: Evidence | None = None
