"""A trace held by what its file says alone: what a player of vectors in any language has to do."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.exchange import On, Reply
from kvref_conformance.oracle.expected import Arrays, Choice, Expected, Refused, TakenOrRefused, Unjudged, Value
from kvref_conformance.oracle.functions import QuantizedRows
from kvref_conformance.oracle.rows import Reads
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.trace.file import Trace
from kvref_conformance.trace.shrink import renumbered
from kvref_conformance.trace.wire import from_wire


@dataclass(frozen=True)
class Parted:
    """The line of the file at which they part, and how."""

    line: int
    broken: Broken


@np.errstate(all="ignore")
def hold(subject: Subject, trace: Trace) -> Parted | None:
    """None where every reply is as the file says. Raises NotOffered where it cannot go on without what is declined."""
    numbers: dict[int, int] = {}  # the file's ids, and those of this conversation
    results: dict[int, Any] = {}
    for request, reply, line in zip(trace.requests, trace.replies, trace.lines, strict=True):
        try:
            args = {name: renumbered(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:
            continue  # what it refers to was declined
        try:
            must_be(reply).judge(_answer(subject, request.op, on, args), request.op, subject.level)
        except NotOffered:
            if not _only_looks(reply):
                raise
            continue
        except Broken as broken:
            broken.clause = broken.clause or reply.get("clause", "")
            return Parted(line, broken)
        last = subject.conversation[-1]
        if last.reply and not last.reply.error:
            numbers[request.id], results[request.id] = last.request.id, last.reply.ok
    return None


def _answer(subject: Subject, op: str, on: int | None, args: dict[str, Any]) -> Reply:
    """The reply, be it a result or an error. Raises Broken where none came, or no such thing; NotOffered."""
    try:
        subject.call(op, on, args)
    except (Broken, NotOffered):
        raise
    except Exception:
        if subject.conversation[-1].reply is None:
            raise  # the judge's own
    reply = subject.conversation[-1].reply
    assert reply is not None
    return reply


def _only_looks(reply: dict[str, Any]) -> bool:
    """Whether the conversation can go on without it: it was to be refused, or gives something that was there before."""
    ok = reply.get("ok")
    if "error" in reply or set(reply) == {"id", "any", "clause"}:
        return True
    return not (ok is None or "chosen" in reply or (isinstance(ok, dict) and "handle" in ok))


def must_be(reply: dict[str, Any]) -> Expected:
    """A reply of the file as what is expected: the other way round than `Expected.wire`."""
    clause = reply.get("clause", "")
    if "error" in reply:
        kinds = tuple(reply["error"]["kinds"])
        return TakenOrRefused(clause, kinds=kinds) if "any" in reply else Refused(clause, kinds=kinds)
    if "chosen" in reply:
        return Choice(clause, says=reply["chosen"])
    if "any" in reply:
        return Unjudged(clause)
    ok = from_wire(reply["ok"])
    parts = [part for part in (ok if isinstance(ok, list) else [ok]) if isinstance(part, np.ndarray)]
    if not parts:
        return Expected(clause) if ok is None or isinstance(ok, On) else Value(clause, value=ok)
    slack = from_wire(reply.get("within", reply.get("tolerant")))
    slacks = [np.zeros(part.shape) for part in parts] if slack is None else slack if isinstance(slack, list) else [slack]
    used, whole = reply.get("used", ()), parts[0].shape
    return (QuantizedRows if isinstance(ok, list) and len(parts) < len(ok) else Arrays)(
        clause,
        names=tuple(f"part {i}" for i in range(len(parts))) if len(parts) > 1 else ("",),
        parts=tuple(Reads(part, each) for part, each in zip(parts, slacks, strict=False)),
        always_slack="within" in reply,
        unsure=from_wire(reply.get("unsure")),
        used=tuple(slice(stop) for stop in used),
        shape=tuple(size if stop is None else None for stop, size in zip(used, whole, strict=True)) if used else None,
        codes_of=reply.get("codes", ""),
        bits="bits" in reply,
    )
