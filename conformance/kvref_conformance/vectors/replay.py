"""Replays a trace using only the content of its file, without models. A runner of vectors in any language works the same way."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import require_unsplit_error
from kvref_conformance.calls.messages import CallReply, ObjectReference, to_call_error
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    ExactValue,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    LeadingRows,
    UnjudgedReply,
)
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.traces.format import Trace
from kvref_conformance.traces.json_codec import from_wire
from kvref_conformance.traces.portability import require_float32, require_within_limits
from kvref_conformance.traces.shrinking import renumber_references


@dataclass(frozen=True)
class FirstMismatch:
    """The first mismatch, and its line in the file."""

    line: int
    violation: ClauseViolation


@np.errstate(all="ignore")
def replay_file(subject: Subject, trace: Trace) -> FirstMismatch | None:
    """Replay a trace. Returns the first mismatch, or None. Raises NotOffered if a declined call makes the rest meaningless."""
    subject.family = next((request.family for request in trace.requests), "")  # the family whose limits apply
    require_float32(subject)
    numbers: dict[int, int] = {}  # maps the ids in the file to the ids of this replay
    results: dict[int, Any] = {}
    for request, reply, line in zip(trace.requests, trace.replies, trace.lines, strict=True):
        try:
            args = {name: renumber_references(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:
            continue  # it refers to a declined call
        before = len(subject.call_trace)
        try:
            require_within_limits(subject, request, args)
            answer = _make_call(subject, request.op, on, args)
            if request.name in all_families()[subject.family].whole and len(subject.call_trace) > before + 1:
                raise NotOffered(f"{request.op} in one call")
            parse_expectation(reply).judge(answer, request.op, subject.level)
        except NotOffered:
            if not _can_skip(reply) or len(subject.call_trace) > before:
                raise  # the call changes state, or was made in several calls of which some succeeded
            continue
        except ClauseViolation as violation:
            violation.clause = violation.clause or reply.get("clause", "")
            return FirstMismatch(line, violation)
        if not answer.error:
            numbers[request.id], results[request.id] = subject.call_trace[-1].request.id, answer.ok
    return None


def _make_call(subject: Subject, op: str, on: int | None, args: dict[str, Any]) -> CallReply:
    """Make a call and return its reply. Raises ClauseViolation if it does not return or the result is malformed; NotOffered."""
    try:
        result = subject.call(op, on, args)
    except (ClauseViolation, NotOffered):
        raise
    except Exception as error:
        if subject.call_trace[-1].reply is None:
            raise  # an error in the judge itself
        require_unsplit_error(error)
        return CallReply(error=to_call_error(error))
    return CallReply(ObjectReference(result.id) if isinstance(result, ObjectProxy) else result)


def _can_skip(reply: dict[str, Any]) -> bool:
    """Whether the replay can continue without this call: it must raise, or it returns existing data and changes nothing."""
    ok = reply.get("ok")
    if "error" in reply or set(reply) == {"id", "any", "clause"}:
        return True
    return not (ok is None or "chosen" in reply or (isinstance(ok, dict) and "handle" in ok))


def parse_expectation(reply: dict[str, Any]) -> Expectation:
    """The expectation that a reply line describes: the inverse of `Expectation.wire`."""
    clause = reply.get("clause", "")
    if "error" in reply:
        kinds = tuple(reply["error"]["kinds"])
        return AcceptedOrError(clause, kinds=kinds) if "any" in reply else ExpectedError(clause, kinds=kinds)
    if "chosen" in reply:
        return AnyOf(clause, range_text=reply["chosen"])
    if "any" in reply:
        return UnjudgedReply(clause)
    ok = from_wire(reply["ok"])
    parts = [part for part in (ok if isinstance(ok, list) else [ok]) if isinstance(part, np.ndarray)]
    if not parts:
        return Expectation(clause) if ok is None or isinstance(ok, ObjectReference) else ExactValue(clause, value=ok)
    slack = from_wire(reply.get("within", reply.get("tolerant")))
    slacks = [np.zeros(part.shape) for part in parts] if slack is None else slack if isinstance(slack, list) else [slack]
    used, whole = reply.get("used", ()), parts[0].shape
    return (LeadingRows if isinstance(ok, list) and len(parts) < len(ok) else ExpectedArrays)(
        clause,
        names=tuple(f"part {i}" for i in range(len(parts))) if len(parts) > 1 else ("",),
        parts=tuple(ExpectedReads(part, each) for part, each in zip(parts, slacks, strict=False)),
        always_slack="within" in reply,
        undetermined=from_wire(reply.get("unsure")),
        used_slices=tuple(slice(stop) for stop in used),
        shape=tuple(size if stop is None else None for stop, size in zip(used, whole, strict=True)) if used else None,
        codes_of=reply.get("codes", ""),
        bits="bits" in reply,
    )
