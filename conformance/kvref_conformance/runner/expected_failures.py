"""The file of expected failures, which implementers keep with their own tests.

Each line has a clause and optionally the reason; `#` starts a comment, as in the skip files of array-api-tests:

    # The cache stores whatever dtype it is given.
    FMT-LEVEL-04  float64 is stored without an error
"""

from collections.abc import Mapping
from pathlib import Path

from kvref_conformance.clauses import all_clauses, suggest_clause


class ExpectedFailuresError(Exception):
    """The file is invalid. The message names the file, the line and the problem."""


def read_expected_failures(path: Path) -> dict[str, str]:
    """Read the file: the reason by clause, "" if none is given. Raises ExpectedFailuresError or OSError."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        clause, reason = _parse_line(line)
        if not clause:
            continue
        if clause not in all_clauses():
            raise ExpectedFailuresError(f"{path}:{number}: no clause {clause!r}{suggest_clause(clause)}")
        if clause in found:
            raise ExpectedFailuresError(f"{path}:{number}: {clause} is listed twice")
        found[clause] = reason
    return found


def update_expected_failures(path: Path, verdicts: Mapping[str, str]) -> None:
    """Rewrite the file: remove clauses that passed, add clauses that failed, keep comments, reasons and all other clauses.

    verdicts: by clause, in the order in which new clauses are added.
    """
    passed = {clause for clause, verdict in verdicts.items() if verdict in ("passed", "xpassed")}
    failed = [clause for clause, verdict in verdicts.items() if verdict in ("failed", "xfailed")]
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if _parse_line(line)[0] not in passed]
    listed = {_parse_line(line)[0] for line in kept}
    kept += [clause for clause in failed if clause not in listed]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _parse_line(line: str) -> tuple[str, str]:
    """The clause and the reason on a line; both empty for a comment."""
    clause, _, reason = line.partition("#")[0].strip().partition(" ")
    return clause.upper(), reason.strip()
