"""Where traces lie: one file a failing clause and implementation, and one a check where all are kept."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.checking.registry import SEARCHED
from kvref_conformance.outcome import Outcome


def save_failure(outcomes: Sequence[Outcome], folder: Path, clause: str, name: str) -> tuple[Outcome, Path] | None:
    """Write the shortest trace that shows how the clause fails. None where it does not."""
    failed = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    path = folder / f"{clause}-{in_a_path(name)}.jsonl"
    if not failed:
        path.unlink(missing_ok=True)  # of a run before: it no longer fails
        return None
    # A machine names the clause of what it sees; a check may find its clause broken by what breaks another first.
    shortest = min(failed, key=lambda outcome: (not outcome.check.startswith(SEARCHED), sum(map(len, outcome.trace))))
    _write(path, shortest.trace)
    return shortest, path


def save_all(outcomes: Sequence[Outcome], folder: Path, clause: str, name: str) -> None:
    for outcome in outcomes:
        if outcome.trace:
            _write(folder / in_a_path(name) / f"{clause}-{in_a_path(outcome.check)}.jsonl", outcome.trace)


def in_a_path(words: str) -> str:
    """The words as one part of a path: a name comes from an implementation."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", words).strip("-")[:80] or "unnamed"


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
