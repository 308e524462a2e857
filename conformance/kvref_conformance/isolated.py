"""`--isolate`: the same judge in a child process, so that an implementation that dies or hangs for good costs one check.

The child tells of every request before it makes it. When it falls silent or dies, the parent knows which call that was, judges
the conversation up to there, and starts another child for what is left.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from kvref_conformance.asked import Effort
from kvref_conformance.checking.registry import Check, all_checks
from kvref_conformance.drivers.guard import ONCE_HUNG
from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.drivers.pipe import how_it_ended
from kvref_conformance.exchange import Exchange, Request
from kvref_conformance.implementations import load
from kvref_conformance.interface import FAMILIES, offers
from kvref_conformance.judge import Failure, Judge
from kvref_conformance.machines.base import Finding, Search
from kvref_conformance.oracle.witness import Unknown, Witness
from kvref_conformance.outcome import Broken, CannotRun, Died, Hung, Outcome
from kvref_conformance.trace.shrink import Held

STARTING = 120.0  # seconds until a child has loaded the implementation
GRACE = 3.0  # seconds beyond a call's limit, in which the child may stop the call itself


class IsolatedJudge(Judge):
    """A Judge whose checks and machines run in a child."""

    deaths = 12  # each takes a second until the next child is there

    def __init__(self, name: str, effort: Effort) -> None:
        """Raises CannotRun."""
        self._arguments = name, effort
        self._child: multiprocessing.process.BaseProcess | None = None
        self._hung = False
        super().__init__(self._start(), effort, name)

    def _start(self) -> Any:
        """A new child, and the implementation as it describes itself. Raises CannotRun."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        self._child.start()
        theirs.close()
        try:
            late = "cannot run", f"{self._arguments[0]}: it took more than {STARTING:g} s to load"
            said: tuple[str, Any] = self._pipe.recv() if self._pipe.poll(STARTING) else late
        except EOFError:
            said = "cannot run", f"{self._arguments[0]}: loading it ended the process: {self._how_it_ended()}"
        if said[0] == "cannot run":
            self.close()
            raise CannotRun(said[1])
        return SimpleNamespace(**said[1])

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()
            self._child = None

    def checked(self, check: Check) -> Outcome | Failure:
        said = self._ask(("check", all_checks().index(check)))
        if isinstance(said, Outcome):
            return said
        return Failure(check, said.conversation, said.broken)

    def search(self, family: str) -> Search:
        if family not in self._searches:
            found = self._ask(("search", family))
            if isinstance(found, Held):
                assert found.broken is not None
                clause = found.broken.clause or "LAW-01"
                found = {"findings": {clause: Finding(clause, found.conversation, found.broken)}}
            self._searches[family] = Search(self.implementation, **found)
        return self._searches[family]

    def hold(self, requests: list[Request]) -> Held:
        held: Held | Unknown = self._ask(("hold", requests))
        if isinstance(held, Unknown):
            raise held
        return held

    def _ask(self, question: tuple[str, Any]) -> Any:
        """What the child answers; or, where it died or hung, the conversation and what broke."""
        if self._child is None:
            self._start()
        conversation: list[Exchange] = []
        try:
            self._pipe.send(question)
            while True:
                limit = self.effort.timeout + GRACE
                if not self._pipe.poll(min(limit, ONCE_HUNG + GRACE) if self._hung else limit):
                    return self._ended(conversation, f"an answer within {self.effort.timeout:g} s", "none: it was still running")
                said = self._pipe.recv()
                if said[0] == "answer":
                    return said[1]
                _, position, exchange, before = said
                del conversation[position:]
                if before is not None and conversation:
                    conversation[-1].reply = before
                conversation.append(exchange)
        except (EOFError, ConnectionError):
            return self._ended(conversation, "an answer", None)

    def _ended(self, conversation: list[Exchange], expected: str, got: str | None) -> Held:
        kind, self._hung = (Hung, True) if got else (Died, self._hung)
        got = got or f"none: {self._how_it_ended()}"
        self.close()
        what = conversation[-1].request.op if conversation else "the check"
        return Held(conversation, kind(what, expected, got, _clause(conversation)))

    def _how_it_ended(self) -> str:
        assert self._child is not None
        self._child.join(GRACE)
        return how_it_ended(self._child.exitcode)


def _clause(conversation: Sequence[Exchange]) -> str:
    """Whose expectation the last request was to meet; empty where no model speaks for it."""
    witness, clause = Witness("tolerant"), ""
    try:
        for exchange in conversation:
            expected = witness.expect(exchange.request)
            clause = expected.clause
            witness.judge(exchange, expected)
    except (Unknown, Broken):
        pass
    return clause


def _serve(pipe: Connection, name: str, effort: Effort) -> None:
    """The child: judges as it is asked, and tells of each request first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    for stream in (1, 2):  # what an implementation prints is not ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        judge = Judge(load(name), effort, name)
    except CannotRun as error:
        pipe.send(("cannot run", str(error)))
        return
    implementation = judge.implementation
    said = {each: getattr(implementation, each) for each in ("name", "version", "language", "level")}
    offered = dict.fromkeys((family for family in FAMILIES if offers(implementation, family)), True)
    pipe.send(("ready", {**said, "formats": tuple(implementation.formats), **offered}))

    def tell(subject: Subject, exchange: Exchange) -> None:
        before = subject.conversation[-2].reply if len(subject.conversation) > 1 else None
        pipe.send(("call", len(subject.conversation) - 1, exchange, before))

    judge.watchers.append(tell)
    answers: dict[str, Callable[[Any], Any]] = {
        "check": lambda index: _checked(judge, all_checks()[index]),
        "search": lambda family: _portable(judge.search(family)),
        "hold": lambda requests: _held(judge, requests),
    }
    while True:
        try:
            question, about = pipe.recv()
        except EOFError:
            return
        pipe.send(("answer", answers[question](about)))


def _checked(judge: Judge, check: Check) -> Outcome | Held:
    said = judge.checked(check)
    return said if isinstance(said, Outcome) else Held(said.conversation, said.broken)


def _portable(search: Search) -> dict[str, Any]:
    """What was found; the implementation stays in the child."""
    return {"findings": search.findings, "longest": search.longest}


def _held(judge: Judge, requests: list[Request]) -> Held | Unknown:
    try:
        return judge.hold(requests)
    except Unknown as unknown:
        return unknown
