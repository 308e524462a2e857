"""Child processes with their descendants: each child has its own POSIX session, and its process group is killed as a whole.

A program may be a shell script that starts another program, and the other program may hang. Killing only the script would leave
it running. Processes that leave the group on purpose, as daemons do, are not killed.
"""

import contextlib
import os
import signal
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from kvref_conformance.calls import interrupts
from kvref_conformance.drivers.processor_wait import add_process, remove_process


def describe_exit(code: int | None) -> str:
    """The end of a process in words. code: its Popen.returncode, which is negative for a signal."""
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


class ProcessGroup:
    """A child process with its descendants. They are killed by `end`, when this object is collected, or when the judge exits."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """Start the process. options: arguments of subprocess.Popen. Raises OSError."""
        # In its own session, Ctrl-C in a terminal does not reach it; the judge ends it in good order.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(command, start_new_session=True, **options)
        add_process(self.process.pid)
        self._end = weakref.finalize(self, _kill, self.process)  # kills at most once: the process id may be reused later
        _running.add(self)

    def end(self) -> None:
        """Kill the process and its descendants. A second call does nothing."""
        self._end()


_running: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def kill_all_groups() -> None:
    """Kill all child processes, before the judge exits at once."""
    for session in list(_running):
        session.end()


interrupts.exit_callbacks.append(kill_all_groups)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended; macOS raises the second in this case
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    remove_process(process.pid)
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
