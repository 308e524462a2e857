"""Where traces lie: one file a failing clause and implementation, and one a check where all are kept."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.outcome import Outcome


def save_failure(outcomes: Sequence[Outcome], folder: Path, clause: str, name: str) -> tuple[Outcome, Path] | None:
    """Write the trace that shows how the clause fails. None where it does not."""
    path = folder / f"{clause}-{in_a_path(name)}.jsonl"
    shown = next((outcome for outcome in outcomes if outcome.verdict == "failed" and outcome.trace), None)
    if shown is None:
        path.unlink(missing_ok=True)  # of a run before: it no longer fails
        return None
    _write(path, shown.trace)
    return shown, path


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
