"""Compares an implementation with a set of test vectors, file by file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvref_conformance.calls.messages import format_calls
from kvref_conformance.drivers.resource_limits import memory_limit
from kvref_conformance.exceptions import CannotRun, ClauseViolation, NotOffered
from kvref_conformance.implementation_api import offers
from kvref_conformance.limits import Limits
from kvref_conformance.runner.check_runner import CheckRunner, RunEnded
from kvref_conformance.traces.format import Trace, parse_trace
from kvref_conformance.traces.shrinking import index_of_last_request
from kvref_conformance.vectors import formats
from kvref_conformance.vectors.generate import MANIFEST, VERSION, sha256
from kvref_conformance.vectors.replay import FirstMismatch, replay_file

ENTRY_FIELDS = {
    "traces": {"file", "family", "formats", "sha256"},
    "formats": {"file", "format", "sha256"},
}  # fields that are used


@dataclass(frozen=True)
class VectorResult:
    """The result of one file. line: the line of the first mismatch in a trace. calls: the calls up to it."""

    file: str
    group: str  # a family, or "formats"
    verdict: Literal["passed", "failed", "not offered"]
    line: int | None = None
    violation: ClauseViolation | None = None
    calls: list[str] = field(default_factory=list)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a set. Raises CannotRun if it is missing, malformed or of another version; OSError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CannotRun(f"{folder}: expected a set of test vectors, but it contains no {MANIFEST}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CannotRun(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("vectors") != VERSION:
        version = found.get("vectors") if isinstance(found, dict) else None
        raise CannotRun(f"{path}: expected a set of version {VERSION}, got {version!r}")
    for name, fields in ENTRY_FIELDS.items():
        entries = found.get(name)
        if not isinstance(entries, list) or not all(isinstance(each, dict) and fields <= each.keys() for each in entries):
            raise CannotRun(f"{path}: {name}: expected a list of objects with {', '.join(sorted(fields))}")
    return found


def check_vectors(folder: Path, judge: CheckRunner) -> Iterator[VectorResult]:
    """Compare all files. Raises CannotRun if a file is missing or differs from the manifest."""
    listed = read_manifest(folder)
    for entry in listed["traces"]:
        yield _check_trace(folder, entry, judge)
    for entry in listed["formats"]:
        yield _check_format(entry["file"], entry["format"], _read_file(folder, entry), judge)


def _check_format(file: str, format: str, content: bytes, judge: CheckRunner) -> VectorResult:
    try:
        violation = judge.run(_first_format_mismatch, format, content)
    except NotOffered:
        return VectorResult(file, "formats", "not offered")
    except RunEnded as ended:
        return VectorResult(file, "formats", "failed", violation=ended.violation, calls=format_calls(ended.call_trace))
    return VectorResult(file, "formats", "failed" if violation else "passed", violation=violation)


def _first_format_mismatch(judge: CheckRunner, format: str, content: bytes) -> ClauseViolation | None:
    """The first mismatch in a format, or None. Raises NotOffered."""
    try:
        with memory_limit(), np.errstate(all="ignore"):
            formats.check_format_file(judge.begin(), format, content)
    except NotOffered:
        raise
    except ClauseViolation as violation:
        return violation
    except Exception as error:
        return ClauseViolation(format, "no error", f"{type(error).__name__}: {error}")
    return None


def _check_trace(folder: Path, entry: dict[str, Any], judge: CheckRunner) -> VectorResult:
    file, family, content = entry["file"], entry["family"], _read_file(folder, entry)
    if not offers(judge.implementation, family) or set(entry["formats"]) - set(judge.implementation.formats):
        return VectorResult(file, family, "not offered")
    token_hits = Limits(getattr(judge.implementation, "limits", None)).switch(family, "token_hits")
    if family == "prefix" and token_hits != ("token_hits" in entry.get("choices", ())):
        return VectorResult(file, family, "not offered")  # the replies to `match` differ
    trace = parse_trace(folder / file, content.decode(errors="replace").splitlines())
    if trace.header.judge != "model":
        raise CannotRun(f'{folder / file}: expected a trace with "judge": "model", got "{trace.header.judge}"')
    try:
        parted, calls = judge.run(_replay, trace)
    except NotOffered:
        return VectorResult(file, family, "not offered")
    except RunEnded as ended:
        at = index_of_last_request(ended.call_trace, trace.requests)
        return VectorResult(file, family, "failed", trace.lines[at], ended.violation, format_calls(ended.call_trace))
    if parted is None:
        return VectorResult(file, family, "passed")
    return VectorResult(file, family, "failed", parted.line, parted.violation, calls)


def _replay(judge: CheckRunner, trace: Trace) -> tuple[FirstMismatch | None, list[str]]:
    """The first mismatch, or None, and the calls up to it. Raises NotOffered."""
    subject = judge.begin()
    with memory_limit():
        parted = replay_file(subject, trace)
    return parted, format_calls(subject.call_trace) if parted else []


def _read_file(folder: Path, entry: dict[str, Any]) -> bytes:
    path = folder / str(entry["file"])
    if not path.is_file():
        raise CannotRun(f"{path}: listed in the manifest, but missing")
    content = path.read_bytes()
    if sha256(content) != entry["sha256"]:
        raise CannotRun(f"{path}: its SHA-256 differs from the manifest: it was changed after the set was written")
    return content
