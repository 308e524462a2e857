"""What lies behind a wrong token, by all that the engine says if it is let go on."""

from collections.abc import Sequence
from typing import Any

from kvref.canary import UNKNOWN
from kvref_conformance.conversation.exchange import Exchange, On, Request, resolved
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.conversation.trace.shrink import renumbered
from kvref_conformance.engines.diagnosis import diagnose
from kvref_conformance.engines.told import Told
from kvref_conformance.families.engine.model import Engine
from kvref_conformance.oracle.witness import Unknown, Witness
from kvref_conformance.outcome import Broken, NotOffered

PERIODS = 2  # that it is let go on: they tell most
SPEAKING = ("generate", "step", "sample")
AFTER = {"truncate": "a truncation", "remove": "a removal", "extend": "a later piece"}  # what may have happened to a session


def cause(subject: Subject, conversation: Sequence[Exchange], again: bool) -> str:
    """A sentence, or nothing where the last call says no wrong token. again: whether it does so whenever it is made."""
    if conversation[-1].request.name not in SPEAKING:
        return ""
    held = _held(subject, [exchange.request for exchange in conversation]) if again else conversation
    if held is None:
        return ""
    *before, last = held
    scene = _Scene(subject, last.request.on or 0)
    try:
        for exchange in before:
            scene.follow(exchange)
    except (Broken, Unknown, LookupError):
        return ""
    return scene.told_of(last, again)


def _held(subject: Subject, requests: Sequence[Request]) -> list[Exchange] | None:
    """The same calls again, from a fresh start and unjudged; None where they cannot be made."""
    numbers, results = dict[int, int](), dict[int, Any]()
    for request in requests:
        try:
            args = {name: renumbered(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:  # what it refers to was never made
            return None
        try:
            made = subject.call(request.op, on, args)
        except (NotOffered, Broken):
            return None
        except Exception:  # what the implementation refused, as it had to
            made = None
        if made is not None:
            numbers[request.id], results[request.id] = subject.conversation[-1].request.id, made
    return list(subject.conversation)


class _Scene:
    """One engine as its oracle sees it, and what happened to each of its sessions."""

    def __init__(self, subject: Subject, engine: int) -> None:
        self._subject, self._engine = subject, engine
        self._witness = Witness(subject.level, subject.limits)
        self._events: dict[Any, list[tuple[int, str]]] = {}
        self._before: list[Told] = []  # what sessions were, of which tokens were taken

    @property
    def _model(self) -> Engine:
        found = self._witness.models[self._engine]
        assert isinstance(found, Engine)
        return found

    def follow(self, exchange: Exchange) -> None:
        """Raises Broken where a reply before the last is wrong already, and Unknown."""
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
                self._before.append(Told(f"session {session} before {AFTER[request.name]}", tokens, ended=True))

    def told_of(self, last: Exchange, again: bool) -> str:
        """What the session read that said a wrong token in this reply. again: whether it can be let go on."""
        if last.reply is None or last.reply.error:
            return ""
        said = self._tokens(last.reply.ok)
        args = {name: self._resolved(value) for name, value in last.request.args.items()}
        for session, own, goes_on in self._answers(last.request.name, args, said):
            told = self._model.sessions[session]
            if told.first_wrong(own):
                got = [*own, *(self._more(session, len(told.tokens) + len(own)) if goes_on and again else [])]
                canary, name, events = self._model.canary, f"session {session}", tuple(self._events.get(session, ()))
                return str(diagnose(canary, Told(name, told.tokens, events=events), got, self._others(session)) or "")
        return ""

    def _answers(self, name: str, args: dict[str, Any], said: list[int]) -> list[tuple[Any, list[int], bool]]:
        """Of each session that spoke its tokens, and whether it goes on from them."""
        if name == "generate":
            return [(args["session"], said, True)]
        if name == "step":
            return [(session, [token], True) for session, token in zip(args["sessions"], said, strict=False)]
        each = max(1, min(args["count"], self._model.canary.context - self._length(args["session"])))
        return [(args["session"], said[start : start + each], False) for start in range(0, len(said), each)]

    def _more(self, session: Any, length: int) -> list[int]:
        """What it says if nobody stops it, of so many tokens told and said."""
        canary = self._model.canary
        count = min(PERIODS * canary.period, canary.context - length)
        try:
            return self._tokens(self._subject.call("engine.generate", self._engine, {"session": session, "count": count}))
        except Exception:  # whatever it makes of a session that went wrong
            return []

    def _tokens(self, said: Sequence[int]) -> list[int]:
        """Of what came, with an unknown one for each that there is not."""
        return [int(token) if 0 <= token < self._model.canary.vocabulary else UNKNOWN for token in said]

    def _others(self, session: Any) -> list[Told]:
        living = [Told(f"session {each}", told.tokens) for each, told in self._model.sessions.items() if each != session]
        gone = enumerate(self._model.gone, 1)
        return living + self._before + [Told(f"closed session {number}", tokens, ended=True) for number, tokens in gone]

    def _length(self, session: Any) -> int:
        return len(self._model.sessions[session].tokens) if session in self._model.sessions else 0

    def _resolved(self, value: Any) -> Any:
        return value if isinstance(value, On) else resolved(value, self._witness.replies)
