"""Compares an implementation with a set of test vectors, file by file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvref_conformance.calls.messages import show_calls
from kvref_conformance.drivers.resource_limits import memory_limit
from kvref_conformance.implementation_api import offers
from kvref_conformance.outcome import Broken, CannotRun, NotOffered
from kvref_conformance.runner.check_runner import CheckRunner, RunEnded
from kvref_conformance.traces.format import Trace, parsed
from kvref_conformance.traces.shrinking import place_of_last
from kvref_conformance.vectors import formats
from kvref_conformance.vectors.generate import MANIFEST, VERSION, sha256
from kvref_conformance.vectors.replay import FirstMismatch, hold

FIELDS = {"traces": {"file", "family", "formats", "sha256"}, "formats": {"file", "format", "sha256"}}  # fields that are used


@dataclass(frozen=True)
class VectorResult:
    """The result of one file. line: the line of the first mismatch in a trace. calls: the calls up to it."""

    file: str
    group: str  # a family, or "formats"
    verdict: Literal["passed", "failed", "not offered"]
    line: int | None = None
    broken: Broken | None = None
    calls: list[str] = field(default_factory=list)


def manifest(folder: Path) -> dict[str, Any]:
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
    for name, fields in FIELDS.items():
        entries = found.get(name)
        if not isinstance(entries, list) or not all(isinstance(each, dict) and fields <= each.keys() for each in entries):
            raise CannotRun(f"{path}: {name}: expected a list of objects with {', '.join(sorted(fields))}")
    return found


def check(folder: Path, judge: CheckRunner) -> Iterator[VectorResult]:
    """Compare all files. Raises CannotRun if a file is missing or differs from the manifest."""
    listed = manifest(folder)
    for entry in listed["traces"]:
        yield _trace(folder, entry, judge)
    for entry in listed["formats"]:
        yield _format(entry["file"], entry["format"], _content(folder, entry), judge)


def _format(file: str, format: str, content: bytes, judge: CheckRunner) -> VectorResult:
    try:
        broken = judge.run(_compared, format, content)
    except NotOffered:
        return VectorResult(file, "formats", "not offered")
    except RunEnded as ended:
        return VectorResult(file, "formats", "failed", broken=ended.broken, calls=show_calls(ended.conversation))
    return VectorResult(file, "formats", "failed" if broken else "passed", broken=broken)


def _compared(judge: CheckRunner, format: str, content: bytes) -> Broken | None:
    """The first mismatch in a format, or None. Raises NotOffered."""
    try:
        with memory_limit(), np.errstate(all="ignore"):
            formats.check(judge.begin(), format, content)
    except NotOffered:
        raise
    except Broken as broken:
        return broken
    except Exception as error:
        return Broken(format, "no error", f"{type(error).__name__}: {error}")
    return None


def _trace(folder: Path, entry: dict[str, Any], judge: CheckRunner) -> VectorResult:
    file, family, content = entry["file"], entry["family"], _content(folder, entry)
    if not offers(judge.implementation, family) or set(entry["formats"]) - set(judge.implementation.formats):
        return VectorResult(file, family, "not offered")
    trace = parsed(folder / file, content.decode(errors="replace").splitlines())
    if trace.header.judge != "model":
        raise CannotRun(f'{folder / file}: expected a trace with "judge": "model", got "{trace.header.judge}"')
    try:
        parted, calls = judge.run(_held, trace)
    except NotOffered:
        return VectorResult(file, family, "not offered")
    except RunEnded as ended:
        at = place_of_last(ended.conversation, trace.requests)
        return VectorResult(file, family, "failed", trace.lines[at], ended.broken, show_calls(ended.conversation))
    if parted is None:
        return VectorResult(file, family, "passed")
    return VectorResult(file, family, "failed", parted.line, parted.broken, calls)


def _held(judge: CheckRunner, trace: Trace) -> tuple[FirstMismatch | None, list[str]]:
    """The first mismatch, or None, and the calls up to it. Raises NotOffered."""
    subject = judge.begin()
    with memory_limit():
        parted = hold(subject, trace)
    return parted, show_calls(subject.conversation) if parted else []


def _content(folder: Path, entry: dict[str, Any]) -> bytes:
    path = folder / str(entry["file"])
    if not path.is_file():
        raise CannotRun(f"{path}: listed in the manifest, but missing")
    content = path.read_bytes()
    if sha256(content) != entry["sha256"]:
        raise CannotRun(f"{path}: its SHA-256 differs from the manifest: it was changed after the set was written")
    return content
