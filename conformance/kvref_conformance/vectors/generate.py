"""Makes a set of test vectors: the call traces of the checks with the reference, samples of the state machines, the formats, and
a manifest.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np

import kvref
from kvref.formats import FORMATS
from kvref_conformance.calls.messages import Exchange
from kvref_conformance.fuzz.findings import Search
from kvref_conformance.fuzz.hypothesis_runner import run_machine, searched
from kvref_conformance.implementations import load
from kvref_conformance.oracle.formats import MADE_OF
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.outcome import NotOffered
from kvref_conformance.runner.check_runner import CheckRunner, select
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check
from kvref_conformance.traces import format
from kvref_conformance.traces.paths import check_in_a_path
from kvref_conformance.vectors import formats, replay
from kvref_conformance.vectors.alternative_references import CHOOSING, ReversedPool, StridedIds

VERSION = 1
MANIFEST = "manifest.json"
LARGEST = 28_000  # maximum characters of a trace whose clause has another trace within this size
LARGEST_OF_A_CLAUSE = 100_000  # maximum characters of the only trace of a clause
SAMPLES = 5  # call traces per state machine
SAMPLE = 30_000  # maximum characters of one of them
EXAMPLES, STEPS = 3, 10  # call sequences and calls per run of a state machine, whose longest call trace is used


@dataclass
class Vectors:
    """A set of vectors: the files by their path, and the entries of the manifest."""

    files: dict[str, bytes] = field(default_factory=dict)
    traces: list[dict[str, Any]] = field(default_factory=list)
    formats: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def manifest(self) -> dict[str, Any]:
        made = {"spec": kvref.__version__, "hypothesis": hypothesis.__version__}
        lists = {"traces": self.traces, "formats": self.formats, "left_out": self.left_out}
        return {"vectors": VERSION, **made, **lists}

    def leave_out(self, check: Check, why: str) -> None:
        self.left_out.append({"clause": check.clause, "check": check.name, "why": why})

    def write(self, folder: Path) -> None:
        """Write the set, and remove files of an earlier set."""
        for old in [*folder.glob("*/*.jsonl"), *folder.glob("*/*.safetensors")]:
            old.unlink()
        for name, content in (self.files | {MANIFEST: json.dumps(self.manifest(), indent=1).encode() + b"\n"}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def make() -> Vectors:
    """Make the set."""
    vectors = Vectors()
    judge = CheckRunner(load("reference"), Effort(), "reference")
    first: dict[Any, Check] = {}  # by function: the checks of one family are also registered for others
    large: dict[str, list[Large]] = {}  # by clause
    for check in (check for checks in select().values() for check in checks if check.run):
        if first.setdefault(check.run, check) is check:
            _from_check(vectors, judge, check, large.setdefault(check.clause, []))
        else:
            vectors.leave_out(check, f"the same as {first[check.run].name}")
    for clause in large:
        _from_large(vectors, clause, large[clause])
    for family in searched():
        for number, lines in enumerate(_samples(judge, family)):
            _add(vectors, f"machines/{family}-{number}.jsonl", family, lines)
    for name in formats.CLAUSES:
        path, content = f"formats/{name}.safetensors", formats.written(name)
        vectors.files[path] = content
        vectors.formats.append({"file": path, "format": name, "clauses": formats.CLAUSES[name], "sha256": sha256(content)})
    return vectors


@dataclass
class Large:
    """A trace of more than LARGEST characters, which is used if its clause has no smaller one."""

    check: Check
    lines: list[str]

    @property
    def size(self) -> int:
        return sum(map(len, self.lines))


def _from_check(vectors: Vectors, judge: CheckRunner, check: Check, large: list[Large]) -> None:
    """Add the call trace of a check, if the replies alone determine whether an implementation passes."""
    assert check.run
    if check.slow or check.clause == "LAW-18":
        vectors.leave_out(check, "needs gigabytes of memory" if check.slow else "uses production sizes")
        return
    subject = judge.begin(check)
    subject.by_value = True
    try:
        with np.errstate(all="ignore"):
            check.run(subject)
    except NotOffered as missing:
        vectors.leave_out(check, str(missing))
        return
    lines, why = _lines(judge, subject.conversation, check.clause, check.name, LARGEST_OF_A_CLAUSE)
    found = Large(check, lines)
    if not why and found.size > LARGEST:
        large.append(found)
    elif why := why or _depends(lines):
        vectors.leave_out(check, why)
    else:
        _add(vectors, _path_of(check), check.family, lines)


def _from_large(vectors: Vectors, clause: str, large: list[Large]) -> None:
    """Add the smallest suitable large trace of a clause, if the clause has no other."""
    has_one = any(trace["clause"] == clause for trace in vectors.traces)
    for each in sorted(large, key=lambda each: each.size):
        if has_one:
            vectors.leave_out(each.check, f"larger than {LARGEST // 1000} kB, and its clause has a smaller trace")
        elif why := _depends(each.lines):
            vectors.leave_out(each.check, why)
        else:
            _add(vectors, _path_of(each.check), each.check.family, each.lines)
            has_one = True


def _path_of(check: Check) -> str:
    return f"checks/{check.clause}-{check_in_a_path(check.name)}.jsonl"


def _lines(judge: CheckRunner, conversation: list[Exchange], clause: str, check: str, largest: int) -> tuple[list[str], str]:
    """The lines of the trace, or the reason why there is none."""
    larger = f"larger than {largest // 1000} kB"
    if format.bytes_of_arrays(conversation) > largest:
        return [], larger
    if not conversation or not format.judged_by_model(conversation, ModelRunner("exact")):
        return [], "the replies alone do not determine the verdict"
    header = format.Header(clause, check, "model", format.who(judge.implementation, "reference"))
    lines = format.written(header, ModelRunner("exact"), conversation)
    if sum(map(len, lines)) > largest:
        return [], larger
    return lines, ""


def _depends(lines: list[str]) -> str:
    """The reason why only the reference passes the trace, or "": a correct implementation with other choices fails it."""
    trace = format.parsed(Path("trace"), lines)
    chosen = any(request.family in CHOOSING for request in trace.requests)
    for contrary in (ReversedPool(), StridedIds()) if chosen else (ReversedPool(),):
        if replay.hold(CheckRunner(contrary).begin(), trace):
            return "its arguments depend on choices of the reference"
    return ""


def _samples(judge: CheckRunner, family: str) -> Iterator[list[str]]:
    found = 0
    for number in count():
        search = Search(judge.implementation)
        run_machine(family, search, number, EXAMPLES, max(1, STEPS - number // SAMPLES))  # fewer calls if traces are too large
        lines, why = _lines(judge, search.longest, "any", f"any sequence of calls ({family})", SAMPLE)
        if not (why or _depends(lines)):
            yield lines
            found += 1
        if found == SAMPLES:
            return


def _add(vectors: Vectors, path: str, family: str, lines: list[str]) -> None:
    content = "\n".join(lines).encode() + b"\n"
    messages = [json.loads(line) for line in lines]
    named = sorted({text for message in messages for text in message.get("args", {}).values() if isinstance(text, str)})
    vectors.files[path] = content
    vectors.traces.append({
        "file": path, "clause": messages[0]["clause"], "check": messages[0]["check"], "family": family,
        "formats": sorted({part for name in named for part in MADE_OF.get(name, (name,)) if part in FORMATS}), "level": "exact",
        "clauses": sorted({message["clause"] for message in messages[1:] if "clause" in message}),
        "sha256": sha256(content),
    })  # fmt: skip


def sha256(content: bytes) -> str:
    """The SHA-256 in hexadecimal, as `sha256sum` prints it."""
    return hashlib.sha256(content).hexdigest()
