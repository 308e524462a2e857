"""The outcomes of a check, and the exceptions that produce them.

A check passes by returning. It fails by raising Broken, and is not offered if it raises NotOffered. CannotRun ends a whole run.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not offered", "not run"]


class CannotRun(Exception):
    """The run cannot start or continue, for example because the implementation cannot be loaded. The message is one line."""


class NotOffered(Exception):
    """The implementation does not provide something that the check needs. The message names it."""


class Declined(NotOffered):
    """The implementation does not provide an operation. A derived operation may replace it (calls/derived_operations.py)."""


class Broken(AssertionError):
    """The implementation breaks a clause.

    what: the observed thing ("" for the last call itself). expected, got: the expected and the actual value, as text.
    clause: the clause that is broken; "" means the clause of the check. where: the line of the implementation's code that is
    the cause, "" if unknown.
    """

    def __init__(self, what: str, expected: str, got: str, clause: str = "", where: str = "") -> None:
        super().__init__(f"{what}: expected {expected}, got {got}")
        self.what, self.expected, self.got, self.clause, self.where = what, expected, got, clause, where
        self.row: Any = None  # the actual values of the first wrong row, if an array of several rows is wrong

    def __reduce__(self) -> tuple[type, tuple[str, ...], dict[str, Any]]:
        said = self.what, self.expected, self.got, self.clause, self.where
        return type(self), said, {"row": self.row}  # pickled to cross a process boundary


class Hung(Broken):
    """A call did not return in time. Repeating it would take as long again."""


class Died(Hung):
    """The implementation's process ended, or sent a malformed reply. Repeating the call needs a new process."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    what, expected, got: as in Broken, "" unless the check failed. where: the line of the implementation's code that raised the
    unexpected error or returned the malformed object. missing: the missing thing, "" unless the verdict is "not offered".
    calls: the calls as lines of Python. trace: the call trace, one JSON object per line, if the check failed or all traces are
    kept. through: the derived operations that the check used, as "paged.gather through length and read". cause: a sentence about
    the likely cause of the failure, "" if the family cannot determine one.
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
