"""Diagnosis of a wrong token from the tokens that the engine generates after it."""

from collections.abc import Sequence
from typing import Any

from kvref.canary import UNKNOWN
from kvref_canary.diagnosis.case import RequestHistory
from kvref_canary.diagnosis.explanation import explain_tokens
from kvref_conformance.calls.messages import CallRequest, Exchange, ObjectReference, resolve_references
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families.engine.model import Engine
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.traces.shrinking import renumber_references

PERIODS = 2  # periods to generate after a wrong token, as evidence for the diagnosis
GENERATING = ("generate", "step", "sample")
# names in a diagnosis
AFTER = {"truncate": "a truncation", "remove": "a removal", "extend": "a later chunk", "cancel": "a cancellation"}


def cause(subject: Subject, call_trace: Sequence[Exchange], again: bool) -> str:
    """A sentence that explains the last call's wrong token, or "". again: whether replaying the calls reproduces the failure."""
    if call_trace[-1].request.name not in GENERATING:
        return ""
    calls = _replay(subject, [exchange.request for exchange in call_trace]) if again else call_trace
    if calls is None:
        return ""
    *before, last = calls
    history = _History(subject, last.request.on or 0)
    try:
        for exchange in before:
            history.follow(exchange)
    except (ClauseViolation, UnknownObject, LookupError):
        return ""
    return history.diagnosis(last, again)


def _replay(subject: Subject, requests: Sequence[CallRequest]) -> list[Exchange] | None:
    """Replay the calls on a fresh subject without judging the replies. None if a call cannot be repeated."""
    numbers, results = dict[int, int](), dict[int, Any]()
    for request in requests:
        try:
            args = {name: renumber_references(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:  # it refers to the result of a call that failed
            return None
        try:
            result = subject.call(request.op, on, args)
        except (NotOffered, ClauseViolation):
            return None
        except Exception:  # an error that the call is expected to raise
            result = None
        if result is not None:
            numbers[request.id], results[request.id] = subject.call_trace[-1].request.id, result
    return list(subject.call_trace)


class _History:
    """The expected state of one engine, and the history of each of its sessions."""

    def __init__(self, subject: Subject, engine: int) -> None:
        self._subject, self._engine = subject, engine
        self._runner = ModelRunner(subject.level, subject.limits)
        self._events: dict[Any, list[tuple[int, str]]] = {}
        self._before: list[RequestHistory] = []  # earlier states of sessions from which tokens were removed

    @property
    def _model(self) -> Engine:
        model = self._runner.models[self._engine]
        assert isinstance(model, Engine)
        return model

    def follow(self, exchange: Exchange) -> None:
        """Apply one call and its reply.

        Raises ClauseViolation if the reply is wrong, and UnknownObject if it cannot be judged.
        """
        request = exchange.request
        session = self._resolved(request.args.get("session"))
        tokens = list(self._model.sessions[session].tokens) if request.on == self._engine and self._length(session) else []
        self._runner.judge(exchange, self._runner.expect(request))
        if request.on != self._engine or exchange.reply is None or exchange.reply.error:
            return
        if request.name in ("fork", "load"):
            session = exchange.reply.ok
            self._events[session] = [(self._length(session), f"a {request.name}")]
        elif request.name in AFTER and tokens:
            at = min(len(tokens), self._length(session))
            self._events.setdefault(session, []).append((at, AFTER[request.name]))
            if at < len(tokens):
                self._before.append(RequestHistory(f"session {session} before {AFTER[request.name]}", tokens, ended=True))

    def diagnosis(self, last: Exchange, again: bool) -> str:
        """Diagnosis of the first session with a wrong token in this reply, or "". again: whether it can generate more tokens."""
        if last.reply is None or last.reply.error:
            return ""
        output = self._tokens(last.reply.ok)
        args = {name: self._resolved(value) for name, value in last.request.args.items()}
        for session, own, appends in self._answers(last.request.name, args, output):
            state = self._model.sessions[session]
            if state.first_wrong_token(own):
                got = [*own, *(self._more(session, len(state.tokens) + len(own)) if appends and again else [])]
                canary, name, events = self._model.canary, f"session {session}", tuple(self._events.get(session, ()))
                return explain_tokens(canary, RequestHistory(name, state.tokens, events=events), got, self._others(session))
        return ""

    def _answers(self, name: str, args: dict[str, Any], output: list[int]) -> list[tuple[Any, list[int], bool]]:
        """For each session in the reply: its number, its tokens, and whether the session contains them after the call."""
        if name == "generate":
            return [(args["session"], output, True)]
        if name == "step":
            return [(session, [token], True) for session, token in zip(args["sessions"], output, strict=False)]
        each = max(1, min(args["count"], self._model.canary.context - self._length(args["session"])))
        return [(args["session"], output[start : start + each], False) for start in range(0, len(output), each)]

    def _more(self, session: Any, length: int) -> list[int]:
        """The next tokens that the session generates, for up to PERIODS periods. length: the tokens that it has already."""
        canary = self._model.canary
        count = min(PERIODS * canary.period, canary.context - length)
        try:
            return self._tokens(self._subject.call("engine.generate", self._engine, {"session": session, "count": count}))
        except Exception:  # after a wrong token, any error is possible
            return []

    def _tokens(self, output: Sequence[int]) -> list[int]:
        """The tokens of a reply. Tokens outside the vocabulary are replaced by UNKNOWN."""
        return [int(token) if 0 <= token < self._model.canary.vocabulary else UNKNOWN for token in output]

    def _others(self, session: Any) -> list[RequestHistory]:
        open_sessions = [
            RequestHistory(f"session {each}", state.tokens) for each, state in self._model.sessions.items() if each != session
        ]
        closed_sessions = enumerate(self._model.closed_tokens, 1)
        return (
            open_sessions
            + self._before
            + [RequestHistory(f"closed session {number}", tokens, ended=True) for number, tokens in closed_sessions]
        )

    def _length(self, session: Any) -> int:
        return len(self._model.sessions[session].tokens) if session in self._model.sessions else 0

    def _resolved(self, value: Any) -> Any:
        return value if isinstance(value, ObjectReference) else resolve_references(value, self._runner.replies)
