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
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.fuzz.findings import Search
from kvref_conformance.fuzz.hypothesis_runner import families_with_machine, run_machine
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.formats import COMPONENT_FORMATS
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check
from kvref_conformance.traces import format
from kvref_conformance.traces.paths import check_path_name
from kvref_conformance.vectors import formats, replay
from kvref_conformance.vectors.alternative_references import FAMILIES_WITH_CHOICES, ReversedPool, StridedIds

VERSION = 1
MANIFEST = "manifest.json"
MAX_CHARACTERS = 28_000  # maximum characters of a trace whose clause has another trace within this size
MAX_CHARACTERS_PER_CLAUSE = 100_000  # maximum characters of the only trace of a clause
NUM_SAMPLES = 5  # call traces per state machine
MAX_SAMPLE_CHARACTERS = 30_000  # maximum characters of one of them
CHOICES = {
    "PREFIX-19": ("token_hits",)
}  # the switches of limits that an implementation must declare to pass the traces of a clause
EXAMPLES, STEPS = 3, 10  # call sequences and calls per run of a state machine, whose longest call trace is used


@dataclass
class VectorSet:
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


def make_vectors() -> VectorSet:
    """Make the set."""
    vectors = VectorSet()
    judge, judge_of_token_hits = (
        CheckRunner(load_implementation(name), Effort(), name) for name in ("reference", "reference:token-hits")
    )
    first: dict[Any, Check] = {}  # by function: the checks of one family are also registered for others
    large: dict[str, list[LargeTrace]] = {}  # by clause
    for check in (check for checks in select_checks().values() for check in checks if check.run):
        if first.setdefault(check.run, check) is check:
            own = judge_of_token_hits if check.clause in CHOICES else judge
            _add_check(vectors, own, check, large.setdefault(check.clause, []))
        else:
            vectors.leave_out(check, f"the same as {first[check.run].name}")
    for clause in large:
        _add_large(vectors, clause, large[clause])
    for family in families_with_machine():
        for number, lines in enumerate(_sample_traces(judge, family)):
            _add_trace(vectors, f"machines/{family}-{number}.jsonl", family, lines)
    for name in formats.CLAUSES:
        path, content = f"formats/{name}.safetensors", formats.format_file(name)
        vectors.files[path] = content
        vectors.formats.append({"file": path, "format": name, "clauses": formats.CLAUSES[name], "sha256": sha256(content)})
    return vectors


@dataclass
class LargeTrace:
    """A trace of more than LARGEST characters, which is used if its clause has no smaller one."""

    check: Check
    lines: list[str]

    @property
    def size(self) -> int:
        return sum(map(len, self.lines))


def _add_check(vectors: VectorSet, judge: CheckRunner, check: Check, large: list[LargeTrace]) -> None:
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
    lines, why = _trace_lines(judge, subject.call_trace, check.clause, check.name, MAX_CHARACTERS_PER_CLAUSE)
    found = LargeTrace(check, lines)
    if not why and found.size > MAX_CHARACTERS:
        large.append(found)
    elif why := why or _dependence(lines):
        vectors.leave_out(check, why)
    else:
        _add_trace(vectors, _path_of(check), check.family, lines)


def _add_large(vectors: VectorSet, clause: str, large: list[LargeTrace]) -> None:
    """Add the smallest suitable large trace of a clause, if the clause has no other."""
    has_one = any(trace["clause"] == clause for trace in vectors.traces)
    for each in sorted(large, key=lambda each: each.size):
        if has_one:
            vectors.leave_out(each.check, f"larger than {MAX_CHARACTERS // 1000} kB, and its clause has a smaller trace")
        elif why := _dependence(each.lines):
            vectors.leave_out(each.check, why)
        else:
            _add_trace(vectors, _path_of(each.check), each.check.family, each.lines)
            has_one = True


def _path_of(check: Check) -> str:
    return f"checks/{check.clause}-{check_path_name(check.name)}.jsonl"


def _trace_lines(judge: CheckRunner, call_trace: list[Exchange], clause: str, check: str, largest: int) -> tuple[list[str], str]:
    """The lines of the trace, or the reason why there is none."""
    larger = f"larger than {largest // 1000} kB"
    if format.count_array_bytes(call_trace) > largest:
        return [], larger
    if not call_trace or not format.judged_by_model(call_trace, ModelRunner.of(judge.implementation)):
        return [], "the replies alone do not determine the verdict"
    load = judge.implementation.name
    header = format.Header(clause, check, "model", format.describe_implementation(judge.implementation, load))
    lines = format.trace_lines(header, ModelRunner.of(judge.implementation), call_trace)
    if sum(map(len, lines)) > largest:
        return [], larger
    return lines, ""


def _dependence(lines: list[str]) -> str:
    """The reason why only the reference passes the trace, or "": a correct implementation with other choices fails it."""
    trace = format.parse_trace(Path("trace"), lines)
    chosen = any(request.family in FAMILIES_WITH_CHOICES for request in trace.requests)
    token_hits = "token_hits" in CHOICES.get(trace.header.clause, ())
    for contrary in (ReversedPool(token_hits), StridedIds(token_hits)) if chosen else (ReversedPool(token_hits),):
        if replay.replay_file(CheckRunner(contrary).begin(), trace):
            return "its arguments depend on choices of the reference"
    return ""


def _sample_traces(judge: CheckRunner, family: str) -> Iterator[list[str]]:
    found = 0
    for number in count():
        search = Search(judge.implementation)
        run_machine(
            family, search, number, EXAMPLES, max(1, STEPS - number // NUM_SAMPLES)
        )  # fewer calls if traces are too large
        lines, why = _trace_lines(judge, search.longest, "any", f"any sequence of calls ({family})", MAX_SAMPLE_CHARACTERS)
        if not (why or _dependence(lines)):
            yield lines
            found += 1
        if found == NUM_SAMPLES:
            return


def _add_trace(vectors: VectorSet, path: str, family: str, lines: list[str]) -> None:
    content = "\n".join(lines).encode() + b"\n"
    messages = [json.loads(line) for line in lines]
    named = sorted({text for message in messages for text in message.get("args", {}).values() if isinstance(text, str)})
    vectors.files[path] = content
    vectors.traces.append({
        "file": path, "clause": messages[0]["clause"], "check": messages[0]["check"], "family": family,
        "formats": sorted({part for name in named for part in COMPONENT_FORMATS.get(name, (name,)) if part in FORMATS}),
        "level": "exact",
        "clauses": sorted({message["clause"] for message in messages[1:] if "clause" in message}),
        "sha256": sha256(content),
    })  # fmt: skip
    if choices := CHOICES.get(messages[0]["clause"]):
        vectors.traces[-1]["choices"] = list(choices)


def sha256(content: bytes) -> str:
    """The SHA-256 in hexadecimal, as `sha256sum` prints it."""
    return hashlib.sha256(content).hexdigest()
