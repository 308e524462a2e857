"""What a check can come to: passed, failed with Broken, or stopped by NotOffered; and CannotRun, of a whole run."""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not offered", "not run"]


class CannotRun(Exception):
    """There is nothing to judge: says why in one line."""


class NotOffered(Exception):
    """The implementation does not have what the check needs."""


class Declined(NotOffered):
    """It does not have an operation: others may do instead."""


class Broken(AssertionError):
    """The clause is broken: what was looked at (empty for the last call itself), what was expected, what came.

    clause: whose expectation it was, where the one who looked knows; otherwise it is the check's. where: the line of the
    implementation's code that is to blame, where it is known.
    """

    def __init__(self, what: str, expected: str, got: str, clause: str = "", where: str = "") -> None:
        super().__init__(f"{what}: expected {expected}, got {got}")
        self.what, self.expected, self.got, self.clause, self.where = what, expected, got, clause, where
        self.row: Any = None  # the numbers of the first row of an array that is wrong, where there are several in it

    def __reduce__(self) -> tuple[type, tuple[str, ...], dict[str, Any]]:
        said = self.what, self.expected, self.got, self.clause, self.where
        return type(self), said, {"row": self.row}  # from one process to another


class Hung(Broken):
    """No reply came, and asking again would cost as much time."""


class Died(Hung):
    """No reply came: the process ended, or wrote something else. Asking again takes a new process."""


@dataclass(frozen=True)
class Outcome:
    """What one check said. `what`, `expected` and `got` are empty unless it failed; `missing` unless it was not offered.

    where: the line of the implementation's code that raised what it should not have, or made what is none.
    trace: the conversation, one JSON object a line, where it failed or all are kept.
    through: operations that were made of others, as "gather through length and read".
    cause: a sentence on what lies behind what came, where the family can tell.
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
