"""Holds a conversation again, with the same implementation or another, and says where they part."""

from dataclasses import dataclass

from kvref_conformance.checking.registry import all_checks
from kvref_conformance.judge import Judge
from kvref_conformance.outcome import NotOffered
from kvref_conformance.trace.exchange import show_calls
from kvref_conformance.trace.file import Trace


@dataclass(frozen=True)
class Replay:
    """line: of the file where they part; None where every reply was as it must be, or where a check tells and not a line."""

    parted: bool
    line: int | None
    calls: list[str]
    what: str = ""
    expected: str = ""
    got: str = ""


def replay(trace: Trace, judge: Judge) -> Replay:
    """Raises NotOffered where the implementation lacks what the trace is about."""
    return _by_model(trace, judge) if trace.header.judge == "model" else _by_check(trace, judge)


def _by_model(trace: Trace, judge: Judge) -> Replay:
    for request in trace.requests:
        if request.name == "new" and not hasattr(judge.implementation, request.family):
            raise NotOffered(f"family {request.family}")
    conversation, broken = judge.hold(trace.requests)
    calls = show_calls(conversation)
    if broken is None:
        return Replay(False, None, calls)
    skipped = len(trace.requests) - len(conversation)  # what is not offered is left out, and cannot be where they part
    last = conversation[-1].request
    same = [at for at, request in enumerate(trace.requests) if request.op == last.op and at >= len(conversation) - 1]
    line = trace.lines[same[0]] if skipped >= 0 and same else None
    return Replay(True, line, calls, broken.what, broken.expected, broken.got)


def _by_check(trace: Trace, judge: Judge) -> Replay:
    header = trace.header
    check = next((each for each in all_checks() if (each.clause, each.name) == (header.clause, header.check)), None)
    if check is None:
        raise NotOffered(f"the check {header.check!r} of {header.clause}, which this kvref does not have")
    (outcome,) = judge.clause([check])
    if outcome.verdict == "not offered":
        raise NotOffered(outcome.missing)
    parted = outcome.verdict == "failed"
    return Replay(parted, trace.lines[-1] if parted else None, outcome.calls, outcome.what, outcome.expected, outcome.got)
