"""The exceptions that end a check, a call or a run."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class CannotRun(Exception):
    """The run cannot start or continue, for example because the implementation cannot be loaded. The message is one line."""


def printable(text: str, keep_lines: bool = True) -> str:
    """The text with escape sequences and other control characters replaced by their codes.

    For text that an implementation chose: printed on a terminal, it could change what else is shown. keep_lines: whether line
    breaks stay.
    """
    kept = "\n" if keep_lines else ""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text)


def suggest(word: str, known: Iterable[str]) -> str:
    """A suggestion for a name that does not exist: ": did you mean paged?", or "" if no known name is similar."""
    likely = get_close_matches(word, list(known), n=1)
    return f": did you mean {likely[0]}?" if likely else ""


def require_file(option: str, file: str, remedy: str) -> None:
    """Raise CannotRun if the file or folder that an option names does not exist. remedy: where such a file comes from."""
    if not Path(file).exists():
        raise CannotRun(f"{option}: no file {file} ({remedy})")


class NotOffered(Exception):
    """The implementation does not provide something that the check needs. The message names it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class OperationDeclined(NotOffered):
    """The implementation does not provide an operation. A derived operation may replace it (calls/derived_operations.py)."""


class ClauseViolation(AssertionError):
    """The implementation breaks a clause.

    what: the observed thing ("" for the last call itself). expected, got: the expected and the actual value, as text.
    clause: the clause that is broken; "" means the clause of the check. where: the line of the implementation's code that is
    the cause, "" if unknown.
    """

    def __init__(self, what: str, expected: str, got: str, clause: str = "", where: str = "") -> None:
        expected, got = printable(expected), printable(got)
        super().__init__(f"{what}: expected {expected}, got {got}")
        self.what, self.expected, self.got, self.clause, self.where = what, expected, got, clause, where
        self.row: Any = None  # the actual values of the first wrong row, if an array of several rows is wrong

    def __reduce__(self) -> tuple[type, tuple[str, ...], dict[str, Any]]:
        said = self.what, self.expected, self.got, self.clause, self.where
        return type(self), said, {"row": self.row}  # pickled to cross a process boundary


class CallTimeout(ClauseViolation):
    """A call did not return in time. Repeating it would take as long again."""


class ProcessDeath(CallTimeout):
    """The implementation's process ended, or sent a malformed reply. Repeating the call needs a new process."""
