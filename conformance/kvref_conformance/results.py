"""The results of checks."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["passed", "failed", "not offered", "not run"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    what, expected, got: as in ClauseViolation, "" unless the check failed. where: the line of the implementation's code
    that raised the unexpected error or returned the malformed object. missing: the missing thing, "" unless the verdict is
    "not offered". calls: the calls as lines of Python. trace: the call trace, one JSON object per line, if the check failed
    or all traces are kept. through: the derived operations that the check used, as "paged.gather through length and read".
    cause: a sentence about the likely cause of the failure, "" if the family cannot determine one.
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
