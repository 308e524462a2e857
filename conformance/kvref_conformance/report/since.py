"""The differences between two runs of one implementation: its version, and the clauses whose verdict changed."""

from collections.abc import Iterator

from kvref_conformance.clauses import all_clauses
from kvref_conformance.report.runs import Cell, Run, on_one_line


def changes(before: Run, now: Run) -> list[str]:
    """One line per difference, in the order of the specification."""
    return [on_one_line(line) for line in (*_versions(before, now), *_verdicts(before, now))]


def _versions(before: Run, now: Run) -> Iterator[str]:
    was, is_now = (run.document["implementation"]["version"] for run in (before, now))
    if was != is_now:
        yield f"version {was} -> {is_now}"


def _verdicts(before: Run, now: Run) -> Iterator[str]:
    for clause in all_clauses().values():
        was, cell = Cell(before, clause), Cell(now, clause)
        if was.verdict != cell.verdict:
            why = f": {shown['what']}: expected {shown['expected']}, got {shown['got']}" if (shown := cell.shown) else ""
            yield f"{clause.id} {was.verdict} -> {cell.verdict}{why}"
