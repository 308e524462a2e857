"""Where traces lie: one file a failing clause and implementation, and one a check where all are kept."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.outcome import Outcome

LONGEST = 120  # characters of a name in a path: file systems take 255 bytes, and a clause stands before it


def save_failure(outcomes: Sequence[Outcome], folder: Path, clause: str, name: str) -> tuple[Outcome, Path] | None:
    """Write the trace that shows how the clause fails. None where it does not.

    name: by which the implementation was asked for. Two that call themselves the same are asked for by different ones.
    """
    path = folder / f"{clause}-{name_in_a_path(name)}.jsonl"
    shown = next((outcome for outcome in outcomes if outcome.verdict == "failed" and outcome.trace), None)
    if shown is None:
        path.unlink(missing_ok=True)  # of a run before: it no longer fails
        return None
    _write(path, shown.trace)
    return shown, path


def save_all(outcomes: Sequence[Outcome], folder: Path, clause: str, name: str) -> None:
    for outcome in outcomes:
        if outcome.trace:
            _write(folder / name_in_a_path(name) / f"{clause}-{check_in_a_path(outcome.check)}.jsonl", outcome.trace)


def name_in_a_path(name: str) -> str:
    """The name of an implementation as one part of a path, and no two names as the same one.

    A colon becomes a plus, what else could lead astray its bytes: "zoo:x" is "zoo+x", "./a b" is "=2E=2Fa=20b".
    """
    escaped = re.sub(r"[^A-Za-z0-9_.:-]|^\.", _bytes, name).replace(":", "+") or "="
    if len(escaped) <= LONGEST:
        return escaped
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{escaped[: LONGEST - 16]}={digest}"  # longer by one than any that is whole


def _bytes(character: re.Match[str]) -> str:
    return "".join(f"={byte:02X}" for byte in character[0].encode("utf-8", "surrogatepass"))


def check_in_a_path(words: str) -> str:
    """The sentence that names a check, as a part of a path. They are ours, and a test keeps them apart."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", words).strip("-")[:80]


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")  # a trace that is there is whole, whatever ends this process
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside.replace(path)
