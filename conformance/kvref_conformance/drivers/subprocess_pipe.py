"""A child program that replies to each line on its standard input with one line on its standard output."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.drivers.process_group import ProcessGroup, describe_exit
from kvref_conformance.drivers.resource_limits import MEMORY_LIMIT, TimedOut, strictest_limit

MAX_LINE_BYTES = 64 * 2**20  # maximum bytes per line, in both directions
GRACE = 3.0  # seconds in which the program must exit after its input is closed
EXIT_TIMEOUT = 0.5  # seconds in which the program must exit after its output is closed
MAX_QUOTED_BYTES = 60  # characters of unexpected output that a message quotes


class PipeClosed(Exception):
    """The program did not reply, and has ended. The message describes what happened instead."""


class LineTooLong(Exception):
    """A reply had more than MAX_LINE_BYTES bytes. It was skipped, and the program still runs."""


class SubprocessPipe:
    """One program. `ask` starts it if it is not running."""

    def __init__(self, command: Sequence[str], folder: Path, show_stderr: bool = False) -> None:
        """command: the program and its arguments. The program is searched in `folder`, then on the PATH, and runs in `folder`.

        show_stderr: whether its standard error goes to the judge's; otherwise its last line is quoted if it ends unexpectedly.
        Raises FileNotFoundError if there is no such program, PermissionError if it cannot be executed.
        """
        program = shutil.which(folder / command[0]) or shutil.which(command[0])
        if program is None and (folder / command[0]).is_file():
            raise PermissionError(f"{command[0]} is not executable: run chmod +x on it, or name its interpreter first")
        if program is None:
            raise FileNotFoundError(f"no program {command[0]!r} in {folder} or on the PATH: build it first")
        self._command, self._folder = [program, *command[1:]], folder
        # A duplicate, because pytest may replace or close the standard streams meanwhile; it is closed with this object.
        self._stderr = os.fdopen(os.dup(2), "wb") if show_stderr else tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._stderr.close)
        self._said_is_kept = not show_stderr
        self._session: ProcessGroup | None = None
        self._read = bytearray()  # output that was read after the last reply

    @property
    def is_running(self) -> bool:
        return self._session is not None

    def ask(self, line: bytes) -> bytes:
        """Send a line and return the reply. If it raises (PipeClosed, TimedOut, KeyboardInterrupt), the program was ended.

        Raises LineTooLong without ending the program.
        """
        process = (self._session or self._start()).process
        try:
            self._send(process, line)
            return self._receive(process)
        except LineTooLong:
            raise
        except PipeClosed:
            self.kill()
            raise
        except (BrokenPipeError, EOFError):
            raise PipeClosed(self._describe_exit(process)) from None
        except TimedOut as late:
            if self._read:
                late.got = f"an incomplete line: {quote_output(self._read)}"
            self.kill()
            raise
        except BaseException:
            self.kill()
            raise

    def end(self, line: bytes) -> int | None:
        """Send a last line and close the program's input. Returns the exit code, or None if it did not run or was killed."""
        if self._session is None:
            return None
        process = self._session.process
        with contextlib.suppress(OSError, PipeClosed, EOFError):
            self._send(process, line)
            assert process.stdin
            process.stdin.close()
        try:
            return process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the program and all processes that it started."""
        if self._session is not None:
            self._session.end()
            self._session = None
            self._read.clear()

    def _start(self) -> ProcessGroup:
        if self._said_is_kept:
            self._stderr.seek(0)
            self._stderr.truncate()
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._session = ProcessGroup(self._command, cwd=self._folder, bufsize=0, **streams)
        _limit_memory(self._session.process.pid)
        return self._session

    def _send(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin
        rest = memoryview(line)
        while rest:
            rest = rest[process.stdin.write(rest) :]

    def _receive(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout
        searched, too_long = 0, False
        while (end := self._read.find(b"\n", searched)) < 0:
            too_long |= len(self._read) > MAX_LINE_BYTES
            if too_long:
                del self._read[MAX_QUOTED_BYTES:]  # the beginning is quoted if the line does not end in time
            searched = len(self._read)
            part = process.stdout.read(2**16)
            if not part:
                raise EOFError
            self._read += part
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        if too_long:
            raise LineTooLong
        return line

    def _describe_exit(self, process: subprocess.Popen[bytes]) -> str:
        half = f"an incomplete line: {quote_output(self._read)}; " if self._read else ""
        try:
            how = describe_exit(process.wait(EXIT_TIMEOUT))
        except subprocess.TimeoutExpired:
            how = "the process closed its pipe and kept running"
        self.kill()
        return half + how + self._last_error_line()

    def _last_error_line(self) -> str:
        """The last line of its standard error, as the end of a message."""
        if not self._said_is_kept:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"; last line of stderr: {lines[-1].strip()[:200]!r}" if lines else ""


def quote_output(text: bytes | bytearray) -> str:
    """The beginning of the program's output, quoted."""
    whole = bytes(text[: MAX_QUOTED_BYTES + 1]).decode(errors="replace")
    return repr(whole[:MAX_QUOTED_BYTES] + "..." if len(text) > MAX_QUOTED_BYTES else whole)


def _limit_memory(pid: int) -> None:
    """Limit the program's memory to that of a check in this process, if the system supports it (Linux)."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, (strictest_limit(MEMORY_LIMIT, soft, hard), hard))
