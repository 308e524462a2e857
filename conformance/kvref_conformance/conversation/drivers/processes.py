"""Processes with everything they start: a session of its own each, ended as one.

A program may be a shell script that started another, and that one is who hangs: to end the first alone leaves the second behind.
What leaves its session on purpose, as a daemon does, is not found.
"""

import contextlib
import os
import signal
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from kvref_conformance.conversation import interrupts


def how_it_ended(code: int | None) -> str:
    """code: as Python gives it, negative for a signal."""
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


class Session:
    """A process and whatever it starts, until `end`, or the end of this object or of the judge, whichever is first."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """options: of subprocess.Popen. Raises OSError."""
        # Ctrl-C in a terminal is for the judge, which ends it in good order.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **options)
        self._end = weakref.finalize(self, _kill, self.process)  # which calls it once: the number may be another's later
        _running.add(self)

    def end(self) -> None:
        """Kill all of it that still runs; nothing where that was done before."""
        self._end()


_running: weakref.WeakSet[Session] = weakref.WeakSet()


def end_all() -> None:
    """Before the judge is gone without ceremony."""
    for session in list(_running):
        session.end()


interrupts.at_once.append(end_all)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone; macOS says so with the second
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
