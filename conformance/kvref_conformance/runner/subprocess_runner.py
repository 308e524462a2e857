"""Isolated judging: the checks run in a child process, so that a crash or a permanent hang costs one check, not the run.

The child (`isolated_child`) writes each request to a journal before it makes the call. If the child hangs or ends, the parent
reads from the journal which call was last, reports the failure, and starts another child for the remaining checks.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from kvref_conformance.calls import interrupts
from kvref_conformance.calls.messages import CallRequest, Exchange
from kvref_conformance.drivers.crash_log import CrashLog
from kvref_conformance.drivers.process_group import ProcessGroup, how_it_ended
from kvref_conformance.drivers.resource_limits import ONCE_HUNG
from kvref_conformance.drivers.socket_channel import MalformedFrame, SocketChannel
from kvref_conformance.fuzz.findings import FuzzFailure, Search
from kvref_conformance.limits import Limits
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.outcome import Broken, CannotRun, CheckResult, Died, Hung
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.subprocess_worker import checked, searched
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.shrinking import ReplayResult, place_of_last

POSSIBLE = os.name == "posix"  # other systems cannot pass the descriptors of the channel and the crash log to a child
STARTING = 120.0  # seconds until a child has loaded the implementation
GRACE = 3.0  # seconds after the limit of a call, in which the child may interrupt the call itself
ENDING = 1.0  # seconds in which an idle child ends by itself
LOOK = 0.1  # seconds between two tests whether the child still makes calls
STRAY = "the implementation wrote to a file descriptor that it did not open"
T = TypeVar("T")

# The child gets this process's module search path before it imports anything.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kvref_conformance.runner.subprocess_worker import main; main()"
)


class SubprocessRunner(CheckRunner):
    """A CheckRunner whose checks and state machines run in a child process."""

    deaths = 12  # starting the next child takes a second

    def __init__(
        self,
        name: str,
        effort: Effort,
        told: Callable[["SubprocessRunner"], None] = lambda judge: None,
        beside_others: bool = False,
    ) -> None:
        """told: called with this object before the child loads the implementation, which may take long.

        beside_others: whether other children run at the same time. Raises CannotRun.
        """
        if not POSSIBLE:
            raise CannotRun("--isolate: not supported on this system, only on POSIX systems")
        self._session: ProcessGroup | None = None
        self._hung = False
        # With several processes, more than one OpenMP thread each would compete for cores, and calls could exceed their limit.
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ} if beside_others else None
        told(self)
        super().__init__(self._start(name, effort), effort, name)

    def _start(self, name: str, effort: Effort) -> Any:
        """Start a child. Returns the attributes of the implementation that it loaded. Raises CannotRun."""
        ours, theirs = socket.socketpair()
        self._channel = SocketChannel(ours.detach())
        self._journal = CrashLog()
        with theirs:
            handed = theirs.fileno(), self._journal.descriptor
            command = [sys.executable, "-c", START, json.dumps(sys.path), *map(str, handed)]
            quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # its output is not part of the report
            self._session = ProcessGroup(command, pass_fds=handed, env=self._environment, **quiet)
        late = "cannot run", f"{name}: loading it took more than {STARTING:g} s"
        try:
            self._channel.send((name, effort))
            with interrupts.prompt():
                said: tuple[str, Any] = self._channel.receive(STARTING) if self._channel.speaks(STARTING) else late
        except (MalformedFrame, TimeoutError):
            said = "cannot run", f"{name}: while it was loaded, {STRAY}"
        except (EOFError, ConnectionError):
            said = "cannot run", f"{name}: loading it ended the process: {self._how_it_ended()}"
        except BaseException:
            self._kill()
            raise
        if said[0] == "cannot run":
            self._kill()
            raise CannotRun(said[1])
        return SimpleNamespace(**said[1])

    def hang_up(self) -> None:
        """Close this end of the channel, so that the child starts to end while the caller closes others."""
        if self._session is not None:
            self._channel.hang_up()

    def close(self) -> None:
        """End the child, in good order if it is idle, and all processes that it started."""
        try:
            self.hang_up()
            if self._session is not None:
                self._channel.wait_for_the_end(ENDING)
        finally:
            self._kill()

    def _kill(self) -> None:
        """Kill the child and all processes that it started."""
        if self._session is not None:
            self._session.end()
            self._session = None
            self._channel.close()
            self._journal.close()

    def interrupt(self) -> None:
        """Kill the child from another thread. The thread that waits for its reply then gets RunEnded."""
        if session := self._session:
            session.end()

    def checked(self, check: Check) -> CheckResult | Failure:
        try:
            said = self.run(checked, all_checks().index(check))
        except RunEnded as ended:
            return Failure(check, ended.conversation, ended.broken)
        if isinstance(said, CheckResult):
            return said
        held, through = said
        assert held.broken
        return Failure(check, held.conversation, held.broken, through)

    def search(self, family: str) -> Search:
        if family not in self._searches:
            try:
                found = self.run(searched, family)
            except RunEnded as ended:
                clause = ended.broken.clause or "LAW-01"
                found = {"findings": {clause: FuzzFailure(clause, ended.conversation, ended.broken)}}
            self._searches[family] = Search(self.implementation, **found)
        return self._searches[family]

    def hold(self, requests: list[CallRequest], seconds: float = float("inf")) -> ReplayResult:
        try:
            return self.run(CheckRunner.hold, requests, seconds)
        except RunEnded as ended:
            return ReplayResult(ended.conversation, ended.broken, place_of_last(ended.conversation, requests))

    def run(self, work: Callable[..., T], *about: Any) -> T:
        if self._session is None:
            self._start(self.name, self.effort)
        try:
            self._channel.send((work, about))
            said, answer = self._said()
        except MalformedFrame:
            raise self._ended(Died, "a reply", f"none: {STRAY}") from None
        except TimeoutError:
            raise self._ended(Hung, "a reply", f"none: {STRAY}") from None
        except (EOFError, ConnectionError):
            raise self._ended(Died, "a reply", f"none: {self._how_it_ended()}") from None
        except BaseException:
            self._kill()  # a late reply could be taken for the reply to the next request
            raise
        if said == "raised":
            raise answer
        found: T = answer
        return found

    def _said(self) -> tuple[str, Any]:
        """Receive the child's reply. Raises RunEnded if the child hangs, and the errors of `SocketChannel.receive`."""
        limit = self.effort.timeout if not self._hung else min(self.effort.timeout, ONCE_HUNG)
        written, since = 0, time.monotonic()
        while True:
            with interrupts.prompt():
                message = self._channel.receive(limit + GRACE) if self._channel.speaks(LOOK) else None
            if message:
                said, what = message
                if said != "progress":
                    return said, what
                self.progress(*what)
                since = time.monotonic()
            elif self._journal.last_written() != written:
                written, since = self._journal.last_written(), time.monotonic()
            elif self._session and self._session.process.poll() is not None and not self._channel.speaks(0):
                raise EOFError  # a process that the child started still has the other end open
            elif time.monotonic() - since > limit + GRACE:
                raise self._ended(Hung, f"a reply within {self.effort.timeout:g} s", "none: the call was still running")

    def _ended(self, kind: type[Hung], expected: str, got: str) -> RunEnded:
        conversation = self._journal.read()
        self._hung |= kind is Hung
        self._kill()
        what = conversation[-1].request.op if conversation else "the check"
        return RunEnded(
            conversation, kind(what, expected, got, _clause(conversation, ModelRunner.of(self.implementation).limits))
        )

    def _how_it_ended(self) -> str:
        assert self._session is not None
        try:
            return how_it_ended(self._session.process.wait(GRACE))
        except subprocess.TimeoutExpired:
            return "the process closed its pipe and kept running"


def _clause(conversation: Sequence[Exchange], limits: Limits) -> str:
    """The clause that the reply to the last request must satisfy; "" if no model covers the calls."""
    witness, clause = ModelRunner("tolerant", limits), ""
    try:
        for exchange in conversation:
            expected = witness.expect(exchange.request)
            clause = expected.clause
            witness.judge(exchange, expected)
    except (UnknownObject, Broken):
        pass
    return clause
