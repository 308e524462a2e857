"""Replays a trace with the same implementation or another, and finds the first wrong reply."""

from dataclasses import dataclass, field

from kvref_conformance.calls.messages import Exchange, format_calls
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import offers
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.format import Trace
from kvref_conformance.traces.shrinking import index_of_last_request


@dataclass(frozen=True)
class TraceReplay:
    """The result of a replay.

    mismatch_line: the line of the trace with the first mismatch, None if every reply was correct. calls: the calls that were
    made, as text. what, expected, got: the mismatch, as in ClauseViolation. missing: why requests were left out.
    """

    mismatch_line: int | None
    calls: list[str]
    what: str = ""
    expected: str = ""
    got: str = ""
    missing: list[str] = field(default_factory=list)


def replay_saved_trace(trace: Trace, judge: CheckRunner) -> TraceReplay:
    """Replay a trace. Raises UnknownObject if no model covers it.

    Raises NotOffered if the implementation lacks what its last call needs.
    """
    by_model = trace.header.judge == "model"
    try:
        return judge.run(_replay_by_model if by_model else _replay_by_check, trace)
    except RunEnded as ended:
        calls, violation = format_calls(ended.call_trace), ended.violation
        at = index_of_last_request(ended.call_trace, trace.requests) if by_model else -1
        return TraceReplay(trace.lines[at] if trace.lines else 1, calls, violation.what, violation.expected, violation.got)


def _replay_by_model(judge: CheckRunner, trace: Trace) -> TraceReplay:
    for request in trace.requests:
        if request.name == "new" and not offers(judge.implementation, request.family):
            raise NotOffered(f"family {request.family}")
    result = judge.replay(trace.requests)
    calls, violation, missing = format_calls(result.call_trace), result.violation, list(dict.fromkeys(result.missing))
    if violation is not None and result.last_index is not None:
        return TraceReplay(trace.lines[result.last_index], calls, violation.what, violation.expected, violation.got, missing)
    if missing and result.last_index != len(trace.requests) - 1:
        raise NotOffered(" or ".join(missing))
    return TraceReplay(None, calls, missing=missing)


def _replay_by_check(judge: CheckRunner, trace: Trace) -> TraceReplay:
    header = trace.header
    check = next((each for each in all_checks() if (each.clause, each.name) == (header.clause, header.check)), None)
    if check is None:
        raise NotOffered(f"the check {header.check!r} of {header.clause}, which this version of kvref does not have")
    made = list[Exchange]()
    judge.watchers.append(lambda subject, exchange: made.append(exchange))
    said = judge.judge_check(check)
    judge.watchers.pop()
    if isinstance(said, Failure):
        last = trace.lines[-1] if trace.lines else 1
        return TraceReplay(last, format_calls(said.call_trace), said.what, said.violation.expected, said.violation.got)
    if said.verdict == "not offered":
        raise NotOffered(said.missing)
    return TraceReplay(None, format_calls(_shown_calls(check, judge, made)))


def _shown_calls(check: Check, judge: CheckRunner, made: list[Exchange]) -> list[Exchange]:
    """The calls to print. A state machine makes many call sequences, of which the longest is shown."""
    return made if check.run else judge.search(check.family).longest
