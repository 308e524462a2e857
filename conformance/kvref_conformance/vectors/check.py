"""Holds an implementation against a set of vectors, file by file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvref_conformance.drivers.guard import memory_limit
from kvref_conformance.exchange import show_calls
from kvref_conformance.interface import offers
from kvref_conformance.judge import Judge
from kvref_conformance.outcome import Broken, CannotRun, NotOffered
from kvref_conformance.trace.file import parsed
from kvref_conformance.vectors import formats, recorded
from kvref_conformance.vectors.make import MANIFEST, VERSION, sha256

FIELDS = {"traces": {"file", "family", "formats", "sha256"}, "formats": {"file", "format", "sha256"}}  # that are read


@dataclass(frozen=True)
class Checked:
    """A file of the set, and what came of it. line: of a trace, where they part."""

    file: str
    group: str  # a family, or "formats"
    verdict: Literal["passed", "failed", "not offered"]
    line: int | None = None
    broken: Broken | None = None
    calls: list[str] = field(default_factory=list)


def manifest(folder: Path) -> dict[str, Any]:
    """Raises CannotRun where there is none that this kvref reads, or OSError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CannotRun(f"{folder}: expected a set of vectors, found no {MANIFEST} there")
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


def check(folder: Path, judge: Judge) -> Iterator[Checked]:
    """Raises CannotRun for a file that is missing, or is not what the manifest says."""
    listed = manifest(folder)
    for entry in listed["traces"]:
        yield _trace(folder, entry, judge)
    for entry in listed["formats"]:
        content = _content(folder, entry)
        subject = judge.begin()
        try:
            with memory_limit(), np.errstate(all="ignore"):
                formats.check(subject, entry["format"], content)
        except NotOffered:
            yield Checked(entry["file"], "formats", "not offered")
        except Broken as broken:
            yield Checked(entry["file"], "formats", "failed", broken=broken)
        except Exception as error:
            raised = Broken(entry["format"], "no error", f"{type(error).__name__}: {error}")
            yield Checked(entry["file"], "formats", "failed", broken=raised)
        else:
            yield Checked(entry["file"], "formats", "passed")


def _trace(folder: Path, entry: dict[str, Any], judge: Judge) -> Checked:
    file, family, content = entry["file"], entry["family"], _content(folder, entry)
    if not offers(judge.implementation, family) or set(entry["formats"]) - set(judge.implementation.formats):
        return Checked(file, family, "not offered")
    trace = parsed(folder / file, content.decode(errors="replace").splitlines())
    if trace.header.judge != "model":
        raise CannotRun(f"{folder / file}: expected a trace whose replies say what they must be, got one for its check to judge")
    subject = judge.begin()
    try:
        with memory_limit():
            parted = recorded.hold(subject, trace)
    except NotOffered:
        return Checked(file, family, "not offered")
    if parted is None:
        return Checked(file, family, "passed")
    return Checked(file, family, "failed", parted.line, parted.broken, show_calls(subject.conversation))


def _content(folder: Path, entry: dict[str, Any]) -> bytes:
    path = folder / str(entry["file"])
    if not path.is_file():
        raise CannotRun(f"{path}: the manifest lists it, and it is not there")
    content = path.read_bytes()
    if sha256(content) != entry["sha256"]:
        raise CannotRun(f"{path}: changed since the set was written: its SHA-256 is not the manifest's")
    return content
