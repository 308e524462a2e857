"""Replays a trace with the same implementation or another, and finds the first wrong reply."""

from dataclasses import dataclass, field

from kvref_conformance.calls.messages import Exchange, show_calls
from kvref_conformance.implementation_api import offers
from kvref_conformance.outcome import NotOffered
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.format import Trace
from kvref_conformance.traces.shrinking import place_of_last


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    parted_at: the line of the trace with the first mismatch, None if every reply was correct. calls: the calls that were made, as
    text. what, expected, got: the mismatch, as in Broken. missing: why requests were left out.
    """

    parted_at: int | None
    calls: list[str]
    what: str = ""
    expected: str = ""
    got: str = ""
    missing: list[str] = field(default_factory=list)


def replay(trace: Trace, judge: CheckRunner) -> Replay:
    """Replay a trace. Raises UnknownObject if no model covers it.

    Raises NotOffered if the implementation lacks what its last call needs.
    """
    by_model = trace.header.judge == "model"
    try:
        return judge.run(_by_model if by_model else _by_check, trace)
    except RunEnded as ended:
        calls, broken = show_calls(ended.conversation), ended.broken
        at = place_of_last(ended.conversation, trace.requests) if by_model else -1
        return Replay(trace.lines[at] if trace.lines else 1, calls, broken.what, broken.expected, broken.got)


def _by_model(judge: CheckRunner, trace: Trace) -> Replay:
    for request in trace.requests:
        if request.name == "new" and not offers(judge.implementation, request.family):
            raise NotOffered(f"family {request.family}")
    held = judge.hold(trace.requests)
    calls, broken, missing = show_calls(held.conversation), held.broken, list(dict.fromkeys(held.missing))
    if broken is not None and held.at is not None:
        return Replay(trace.lines[held.at], calls, broken.what, broken.expected, broken.got, missing)
    if missing and held.at != len(trace.requests) - 1:
        raise NotOffered(" or ".join(missing))
    return Replay(None, calls, missing=missing)


def _by_check(judge: CheckRunner, trace: Trace) -> Replay:
    header = trace.header
    check = next((each for each in all_checks() if (each.clause, each.name) == (header.clause, header.check)), None)
    if check is None:
        raise NotOffered(f"the check {header.check!r} of {header.clause}, which this version of kvref does not have")
    made = list[Exchange]()
    judge.watchers.append(lambda subject, exchange: made.append(exchange))
    said = judge.ask_about(check)
    judge.watchers.pop()
    if isinstance(said, Failure):
        last = trace.lines[-1] if trace.lines else 1
        return Replay(last, show_calls(said.conversation), said.what, said.broken.expected, said.broken.got)
    if said.verdict == "not offered":
        raise NotOffered(said.missing)
    return Replay(None, show_calls(_shown(check, judge, made)))


def _shown(check: Check, judge: CheckRunner, made: list[Exchange]) -> list[Exchange]:
    """The calls to print. A state machine makes many call sequences, of which the longest is shown."""
    return made if check.run else judge.search(check.family).longest
