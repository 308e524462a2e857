"""Holds a conversation again, with the same implementation or another, and says where they part."""

from dataclasses import dataclass

from kvref_conformance.checking.registry import all_checks
from kvref_conformance.exchange import show_calls
from kvref_conformance.judge import Judge
from kvref_conformance.outcome import NotOffered
from kvref_conformance.trace.file import Trace


@dataclass(frozen=True)
class Replay:
    """parted_at: the line of the file; None where every reply was as it must be."""

    parted_at: int | None
    calls: list[str]
    what: str = ""
    expected: str = ""
    got: str = ""


def replay(trace: Trace, judge: Judge) -> Replay:
    """Raises NotOffered where the implementation lacks what the trace is about; Unknown where no model speaks for it."""
    return _by_model(trace, judge) if trace.header.judge == "model" else _by_check(trace, judge)


def _by_model(trace: Trace, judge: Judge) -> Replay:
    for request in trace.requests:
        if request.name == "new" and not hasattr(judge.implementation, request.family):
            raise NotOffered(f"family {request.family}")
    held = judge.hold(trace.requests)
    calls, broken = show_calls(held.conversation), held.broken
    if broken is None or held.at is None:
        return Replay(None, calls)
    return Replay(trace.lines[held.at], calls, broken.what, broken.expected, broken.got)


def _by_check(trace: Trace, judge: Judge) -> Replay:
    header = trace.header
    check = next((each for each in all_checks() if (each.clause, each.name) == (header.clause, header.check)), None)
    if check is None:
        raise NotOffered(f"the check {header.check!r} of {header.clause}, which this kvref does not have")
    (outcome,) = judge.clause([check])
    if outcome.verdict == "not offered":
        raise NotOffered(outcome.missing)
    parted_at = trace.lines[-1] if outcome.verdict == "failed" else None
    return Replay(parted_at, outcome.calls, outcome.what, outcome.expected, outcome.got)
