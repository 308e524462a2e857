"""Diagnosis of a wrong token from the tokens that the engine generates after it."""

from collections.abc import Sequence
from typing import Any

from kvref.canary import UNKNOWN
from kvref_canary.diagnosis.case import RequestHistory
from kvref_canary.diagnosis.diagnose import diagnose
from kvref_conformance.calls.messages import CallRequest, Exchange, ObjectReference, resolved
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.engine.model import Engine
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.traces.shrinking import renumbered

PERIODS = 2  # periods to generate after a wrong token, as evidence for the diagnosis
SPEAKING = ("generate", "step", "sample")
AFTER = {"truncate": "a truncation", "remove": "a removal", "extend": "a later chunk"}  # names in a diagnosis


def cause(subject: Subject, conversation: Sequence[Exchange], again: bool) -> str:
    """A sentence that explains the last call's wrong token, or "". again: whether replaying the calls reproduces the failure."""
    if conversation[-1].request.name not in SPEAKING:
        return ""
    held = _held(subject, [exchange.request for exchange in conversation]) if again else conversation
    if held is None:
        return ""
    *before, last = held
    scene = _History(subject, last.request.on or 0)
    try:
        for exchange in before:
            scene.follow(exchange)
    except (Broken, UnknownObject, LookupError):
        return ""
    return scene.told_of(last, again)


def _held(subject: Subject, requests: Sequence[CallRequest]) -> list[Exchange] | None:
    """Replay the calls on a fresh subject without judging the replies. None if a call cannot be repeated."""
    numbers, results = dict[int, int](), dict[int, Any]()
    for request in requests:
        try:
            args = {name: renumbered(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:  # it refers to the result of a call that failed
            return None
        try:
            made = subject.call(request.op, on, args)
        except (NotOffered, Broken):
            return None
        except Exception:  # an error that the call is expected to raise
            made = None
        if made is not None:
            numbers[request.id], results[request.id] = subject.conversation[-1].request.id, made
    return list(subject.conversation)


class _History:
    """The expected state of one engine, and the history of each of its sessions."""

    def __init__(self, subject: Subject, engine: int) -> None:
        self._subject, self._engine = subject, engine
        self._witness = ModelRunner(subject.level, subject.limits)
        self._events: dict[Any, list[tuple[int, str]]] = {}
        self._before: list[RequestHistory] = []  # earlier states of sessions from which tokens were removed

    @property
    def _model(self) -> Engine:
        found = self._witness.models[self._engine]
        assert isinstance(found, Engine)
        return found

    def follow(self, exchange: Exchange) -> None:
        """Apply one call and its reply. Raises Broken if the reply is wrong, and UnknownObject if it cannot be judged."""
        request = exchange.request
        session = self._resolved(request.args.get("session"))
        tokens = list(self._model.sessions[session].tokens) if request.on == self._engine and self._length(session) else []
        self._witness.judge(exchange, self._witness.expect(request))
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

    def told_of(self, last: Exchange, again: bool) -> str:
        """Diagnosis of the first session with a wrong token in this reply, or "". again: whether it can generate more tokens."""
        if last.reply is None or last.reply.error:
            return ""
        said = self._tokens(last.reply.ok)
        args = {name: self._resolved(value) for name, value in last.request.args.items()}
        for session, own, goes_on in self._answers(last.request.name, args, said):
            told = self._model.sessions[session]
            if told.first_wrong(own):
                got = [*own, *(self._more(session, len(told.tokens) + len(own)) if goes_on and again else [])]
                canary, name, events = self._model.canary, f"session {session}", tuple(self._events.get(session, ()))
                return str(diagnose(canary, RequestHistory(name, told.tokens, events=events), got, self._others(session)) or "")
        return ""

    def _answers(self, name: str, args: dict[str, Any], said: list[int]) -> list[tuple[Any, list[int], bool]]:
        """For each session in the reply: its number, its tokens, and whether the session contains them after the call."""
        if name == "generate":
            return [(args["session"], said, True)]
        if name == "step":
            return [(session, [token], True) for session, token in zip(args["sessions"], said, strict=False)]
        each = max(1, min(args["count"], self._model.canary.context - self._length(args["session"])))
        return [(args["session"], said[start : start + each], False) for start in range(0, len(said), each)]

    def _more(self, session: Any, length: int) -> list[int]:
        """The next tokens that the session generates, for up to PERIODS periods. length: the tokens that it has already."""
        canary = self._model.canary
        count = min(PERIODS * canary.period, canary.context - length)
        try:
            return self._tokens(self._subject.call("engine.generate", self._engine, {"session": session, "count": count}))
        except Exception:  # after a wrong token, any error is possible
            return []

    def _tokens(self, said: Sequence[int]) -> list[int]:
        """The tokens of a reply. Tokens outside the vocabulary are replaced by UNKNOWN."""
        return [int(token) if 0 <= token < self._model.canary.vocabulary else UNKNOWN for token in said]

    def _others(self, session: Any) -> list[RequestHistory]:
        living = [
            RequestHistory(f"session {each}", told.tokens) for each, told in self._model.sessions.items() if each != session
        ]
        gone = enumerate(self._model.gone, 1)
        return living + self._before + [RequestHistory(f"closed session {number}", tokens, ended=True) for number, tokens in gone]

    def _length(self, session: Any) -> int:
        return len(self._model.sessions[session].tokens) if session in self._model.sessions else 0

    def _resolved(self, value: Any) -> Any:
        return value if isinstance(value, ObjectReference) else resolved(value, self._witness.replies)
