"""The files of traces: one per implementation and failing clause, or one per check if all traces are kept."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.results import CheckResult

MAX_NAME_LENGTH = 120  # characters of a name in a path: file systems allow 255 bytes, and the clause precedes the name


def save_failure(outcomes: Sequence[CheckResult], folder: Path, clause: str, name: str) -> tuple[CheckResult, Path] | None:
    """Write the trace of the first failed check. Returns its outcome and path; None if no check failed with a trace.

    name: the name by which the user selected the implementation. It is unique, unlike the implementation's own name.
    """
    path = folder / f"{clause}-{implementation_path_name(name)}.jsonl"
    shown = next((outcome for outcome in outcomes if outcome.verdict == "failed" and outcome.trace), None)
    if shown is None:
        path.unlink(missing_ok=True)  # the trace of an earlier run in which the clause failed
        return None
    _write_lines(path, shown.trace)
    return shown, path


def save_all_traces(outcomes: Sequence[CheckResult], folder: Path, clause: str, name: str) -> None:
    for outcome in outcomes:
        if outcome.trace:
            _write_lines(
                folder / implementation_path_name(name) / f"{clause}-{check_path_name(outcome.check)}.jsonl", outcome.trace
            )


def implementation_path_name(name: str) -> str:
    """The name of an implementation as one path component. Different names have different components.

    A colon becomes a plus; other unsafe characters become their bytes in hexadecimal: "zoo:x" is "zoo+x", "./a b" is
    "=2E=2Fa=20b".
    """
    escaped = re.sub(r"[^A-Za-z0-9_.:-]|^\.", _escape_character, name).replace(":", "+") or "="
    if len(escaped) <= MAX_NAME_LENGTH:
        return escaped
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{escaped[: MAX_NAME_LENGTH - 16]}={digest}"  # LONGEST + 1 characters, so it never equals an unshortened name


def _escape_character(character: re.Match[str]) -> str:
    return "".join(f"={byte:02X}" for byte in character[0].encode("utf-8", "surrogatepass"))


def check_path_name(words: str) -> str:
    """The name of a check as a path component. A test ensures that the components of all checks differ."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", words).strip("-")[:80]


def _write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")  # renamed when complete, so that no partial trace is ever read
    beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    beside.replace(path)
