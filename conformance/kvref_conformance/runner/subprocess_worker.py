"""The child process of a `SubprocessRunner`: runs checks on request, and writes each call to the crash log before it makes it."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from kvref_conformance.drivers.crash_log import CrashLogWriter
from kvref_conformance.drivers.resource_limits import collect_rarely
from kvref_conformance.drivers.socket_channel import SocketChannel
from kvref_conformance.exceptions import CannotRun, NotOffered
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.model_runner import UnknownObject
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import all_checks
from kvref_conformance.traces.shrinking import ReplayResult

PARENT_POLL_INTERVAL = 0.5  # seconds between two tests whether the parent still runs
END_TIMEOUT = 1.0  # seconds in which this process may end by itself after the parent has ended
FORWARDED_ERRORS = (CannotRun, NotOffered, UnknownObject)  # exceptions that are results, not errors in the judge


def main() -> None:
    """The main function. sys.argv ends with the descriptors of the channel and of the crash log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    channel, journal = SocketChannel(int(sys.argv[2])), int(sys.argv[3])
    os.dup(int(sys.argv[2]))  # keeps the socket open if `channel` is closed: the parent gets EOF only when this process ends
    name: str
    effort: Effort
    name, effort = channel.receive()
    try:
        judge = CheckRunner(load_implementation(name), effort, name)
    except CannotRun as error:
        channel.send(("cannot run", str(error)))
        return
    collect_rarely()
    judge.watchers.append(CrashLogWriter(journal))
    judge.progress = lambda *how_far: channel.send(("progress", how_far))
    implementation = judge.implementation
    said = {each: getattr(implementation, each) for each in ("name", "version", "language", "level")}
    said |= {"limits": getattr(implementation, "limits", None), "project": getattr(implementation, "project", said["name"])}
    offered = dict.fromkeys((family for family in families() if offers(implementation, family)), True)
    channel.send(("ready", {**said, "formats": tuple(implementation.formats), **offered}))
    while True:
        try:
            work, about = channel.receive()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = "answer", work(judge, *about)
        except FORWARDED_ERRORS as error:
            answer = "raised", error
        except Exception:  # an error in the judge, not in the implementation
            answer = "raised", RuntimeError(traceback.format_exc())
        channel.send(answer)


def _die_with_parent(parent: int) -> None:
    """Kill this process and all that it started when the parent ends. Otherwise a hanging call would run on permanently."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_INTERVAL)
    time.sleep(END_TIMEOUT)  # the closed channel also ends this process, in good order
    os.killpg(os.getpgrp(), signal.SIGKILL)


def run_check(judge: CheckRunner, index: int) -> CheckResult | tuple[ReplayResult, Sequence[str]]:
    """Run the check of this index in all_checks(). (Functions cannot be sent to the parent.)"""
    said = judge.run_check(all_checks()[index])
    return said if isinstance(said, CheckResult) else (ReplayResult(said.call_trace, said.violation), said.derivations_used)


def run_state_machine(judge: CheckRunner, family: str) -> dict[str, Any]:
    """Run a state machine, and return the parts of its Search that can be sent to the parent."""
    search = judge.search(family)
    return {"findings": search.findings, "longest": search.longest, "through": search.through}
