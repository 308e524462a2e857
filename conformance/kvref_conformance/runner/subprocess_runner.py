"""Isolated judging: the checks run in a child process, so that a crash or a permanent hang costs one check, not the run.

The child (`subprocess_worker`) writes each request to a journal before it makes the call. If the child hangs or ends, the parent
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
from kvref_conformance.drivers.process_group import ProcessGroup, describe_exit
from kvref_conformance.drivers.processor_wait import processor_wait
from kvref_conformance.drivers.resource_limits import TIMEOUT_AFTER_HANG
from kvref_conformance.drivers.socket_channel import MalformedFrame, SocketChannel
from kvref_conformance.exceptions import CallTimeout, CannotRun, ClauseViolation, ProcessDeath
from kvref_conformance.fuzz.findings import FuzzFailure, Search
from kvref_conformance.implementations import is_program, load_implementation, runs_foreign_code
from kvref_conformance.limits import Limits
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_worker import run_check, run_state_machine
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces.shrinking import ReplayResult, index_of_last_request

SUPPORTED = os.name == "posix"  # other systems cannot pass the descriptors of the channel and the crash log to a child
START_TIMEOUT = 120.0  # seconds until a child has loaded the implementation
REPLY_GRACE = 3.0  # seconds after the limit of a call, in which the child may interrupt the call itself
END_TIMEOUT = 1.0  # seconds in which an idle child ends by itself
POLL_INTERVAL = 0.1  # seconds between two tests whether the child still makes calls
STRAY_WRITE = "the implementation wrote to a file descriptor that it did not open"
T = TypeVar("T")

# The child gets this process's module search path before it imports anything.
CHILD_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kvref_conformance.runner.subprocess_worker import main; main()"
)


class SubprocessRunner(CheckRunner):
    """A CheckRunner whose checks and state machines run in a child process."""

    max_deaths = 12  # starting the next child takes a second

    def __init__(
        self,
        name: str,
        effort: Effort,
        on_start: Callable[["SubprocessRunner"], None] = lambda judge: None,
        beside_others: bool = False,
    ) -> None:
        """told: called with this object before the child loads the implementation, which may take long.

        beside_others: whether other children run at the same time. Raises CannotRun.
        """
        if not SUPPORTED:
            raise CannotRun("--isolate: not supported on this system, only on POSIX systems")
        self._session: ProcessGroup | None = None
        self._hung = False
        # With several processes, more than one OpenMP thread each would compete for cores, and calls could exceed their limit.
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ} if beside_others else None
        on_start(self)
        super().__init__(self._start(name, effort), effort, name)

    def _start(self, name: str, effort: Effort) -> Any:
        """Start a child. Returns the attributes of the implementation that it loaded. Raises CannotRun."""
        ours, theirs = socket.socketpair()
        self._channel = SocketChannel(ours.detach())
        self._journal = CrashLog()
        with theirs:
            handed = theirs.fileno(), self._journal.descriptor
            command = [sys.executable, "-c", CHILD_CODE, json.dumps(sys.path), *map(str, handed)]
            quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # its output is not part of the report
            self._session = ProcessGroup(command, pass_fds=handed, env=self._environment, **quiet)
        late = "cannot run", f"{name}: loading it took more than {START_TIMEOUT:g} s"
        try:
            self._channel.send((name, effort))
            with interrupts.allow_interrupts():
                said: tuple[str, Any] = self._channel.receive(START_TIMEOUT) if self._channel.has_data(START_TIMEOUT) else late
        except (MalformedFrame, TimeoutError):
            said = "cannot run", f"{name}: while it was loaded, {STRAY_WRITE}"
        except (EOFError, ConnectionError):
            said = "cannot run", f"{name}: loading it ended the process: {self._describe_exit()}"
        except BaseException:
            self._kill()
            raise
        if said[0] == "cannot run":
            self._kill()
            raise CannotRun(said[1])
        return SimpleNamespace(**said[1])

    def shut_down(self) -> None:
        """Close this end of the channel, so that the child starts to end while the caller closes others."""
        if self._session is not None:
            self._channel.shut_down()

    def close(self) -> None:
        """End the child, in good order if it is idle, and all processes that it started."""
        try:
            self.shut_down()
            if self._session is not None:
                self._channel.drain_until_closed(END_TIMEOUT)
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

    def run_check(self, check: Check) -> CheckResult | Failure:
        try:
            said = self.run(run_check, all_checks().index(check))
        except RunEnded as ended:
            return Failure(check, ended.call_trace, ended.violation)
        if isinstance(said, CheckResult):
            return said
        result, through = said
        assert result.violation
        return Failure(check, result.call_trace, result.violation, through)

    def search(self, family: str) -> Search:
        if family not in self._searches:
            try:
                found = self.run(run_state_machine, family)
            except RunEnded as ended:
                clause = ended.violation.clause or "LAW-01"
                found = {"findings": {clause: FuzzFailure(clause, ended.call_trace, ended.violation)}}
            self._searches[family] = Search(self.implementation, **found)
        return self._searches[family]

    def replay(self, requests: list[CallRequest], seconds: float = float("inf")) -> ReplayResult:
        try:
            return self.run(CheckRunner.replay, requests, seconds)
        except RunEnded as ended:
            return ReplayResult(ended.call_trace, ended.violation, index_of_last_request(ended.call_trace, requests))

    def run(self, work: Callable[..., T], *about: Any) -> T:
        if self._session is None:
            self._start(self.name, self.effort)
        try:
            self._channel.send((work, about))
            said, answer = self._receive_reply()
        except MalformedFrame:
            raise self._run_ended(ProcessDeath, "a reply", f"none: {STRAY_WRITE}") from None
        except TimeoutError:
            raise self._run_ended(CallTimeout, "a reply", f"none: {STRAY_WRITE}") from None
        except (EOFError, ConnectionError):
            raise self._run_ended(ProcessDeath, "a reply", f"none: {self._describe_exit()}") from None
        except BaseException:
            self._kill()  # a late reply could be taken for the reply to the next request
            raise
        if said == "raised":
            raise answer
        found: T = answer
        return found

    def _receive_reply(self) -> tuple[str, Any]:
        """Receive the child's reply. Raises RunEnded if the child hangs, and the errors of `SocketChannel.receive`."""
        limit = self.effort.timeout if not self._hung else min(self.effort.timeout, TIMEOUT_AFTER_HANG)
        written, since, waited = 0, time.monotonic(), self._processor_wait()
        while True:
            with interrupts.allow_interrupts():
                message = self._channel.receive(limit + REPLY_GRACE) if self._channel.has_data(POLL_INTERVAL) else None
            if message:
                said, what = message
                if said != "progress":
                    return said, what
                self.progress(*what)
                since, waited = time.monotonic(), self._processor_wait()
            elif self._journal.last_written() != written:
                written, since, waited = self._journal.last_written(), time.monotonic(), self._processor_wait()
            elif self._session and self._session.process.poll() is not None and not self._channel.has_data(0):
                raise EOFError  # a process that the child started still has the other end open
            elif time.monotonic() - since - max(0.0, self._processor_wait() - waited) > limit + REPLY_GRACE:
                raise self._run_ended(
                    CallTimeout, f"a reply within {self.effort.timeout:g} s", "none: the call was still running"
                )

    def _processor_wait(self) -> float:
        return processor_wait(self._session.process.pid) if self._session else 0.0

    def _run_ended(self, kind: type[CallTimeout], expected: str, got: str) -> RunEnded:
        call_trace = self._journal.read()
        self._hung |= kind is CallTimeout
        self._kill()
        what = call_trace[-1].request.op if call_trace else "the check"
        return RunEnded(
            call_trace, kind(what, expected, got, _clause_of_last_call(call_trace, ModelRunner.of(self.implementation).limits))
        )

    def _describe_exit(self) -> str:
        assert self._session is not None
        try:
            return describe_exit(self._session.process.wait(REPLY_GRACE))
        except subprocess.TimeoutExpired:
            return "the process closed its pipe and kept running"


def _clause_of_last_call(call_trace: Sequence[Exchange], limits: Limits) -> str:
    """The clause that the reply to the last request must satisfy; "" if no model covers the calls."""
    models, clause = ModelRunner("tolerant", limits), ""
    try:
        for exchange in call_trace:
            expected = models.expect(exchange.request)
            clause = expected.clause
            models.judge(exchange, expected)
    except (UnknownObject, ClauseViolation):
        pass
    return clause


def runs_in_subprocess(run_options: RunOptions) -> bool:
    """Whether the implementation runs in a child process of the judge. A program has its own process in any case."""
    if is_program(run_options.name):
        return False
    return SUPPORTED and runs_foreign_code(run_options.name) if run_options.isolate is None else run_options.isolate


def make_runner(run_options: RunOptions) -> CheckRunner:
    """Load the implementation and return its judge. Raises CannotRun if it cannot be loaded."""
    if runs_in_subprocess(run_options):
        return SubprocessRunner(run_options.name, run_options.effort)
    return CheckRunner(load_implementation(run_options.name, run_options.show_stderr), run_options.effort, run_options.name)
