"""A program that answers each line on its standard input with a line on its standard output: started, asked, ended."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.conversation.drivers.guard import MEMORY, TimedOut, stricter
from kvref_conformance.conversation.drivers.processes import Session, how_it_ended

LONGEST = 64 * 2**20  # bytes of a line, either way
GRACE = 3.0  # seconds to end in, once its input is closed
GONE = 0.5  # seconds to be gone in, once its output is closed
SHOWN = 60  # characters of what it wrote instead


class Lost(Exception):
    """No answer came, and the program is gone: says what came instead."""


class Pipe:
    """One program, started when it is first asked, and again when it is asked after its end."""

    def __init__(self, command: Sequence[str], folder: Path, show_stderr: bool = False) -> None:
        """command: looked for in `folder`, in which it runs too, or on the PATH. Raises OSError where there is none."""
        program = shutil.which(folder / command[0]) or shutil.which(command[0])
        if program is None and (folder / command[0]).is_file():
            raise PermissionError(f"{command[0]} is a file that cannot be executed: chmod +x, or name the interpreter first")
        if program is None:
            raise FileNotFoundError(f"no program {command[0]!r} in {folder} or on the PATH")
        self._command, self._folder = [program, *command[1:]], folder
        # A stream of our own, whatever pytest does to the standard ones meanwhile; it is closed with this object.
        self._stderr = os.fdopen(os.dup(2), "wb") if show_stderr else tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._stderr.close)
        self._said_is_kept = not show_stderr
        self._session: Session | None = None
        self._read = bytearray()  # past the last answer

    @property
    def runs(self) -> bool:
        return self._session is not None

    def ask(self, line: bytes) -> bytes:
        """Its next line. Raises Lost, and whatever stops the wait; it is gone after both."""
        process = (self._session or self._start()).process
        try:
            self._send(process, line)
            return self._receive(process)
        except Lost:
            self.kill()
            raise
        except (BrokenPipeError, EOFError):
            raise Lost(self._how_it_ended(process)) from None
        except TimedOut as late:
            if self._read:
                late.got = f"half a line: {shown(self._read)}"
            self.kill()
            raise
        except BaseException:
            self.kill()
            raise

    def end(self, line: bytes) -> int | None:
        """Say a last line, close its input, and give its exit code; None where it had to be killed."""
        if self._session is None:
            return None
        process = self._session.process
        with contextlib.suppress(OSError, Lost, EOFError):
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
        """End it, and whatever it started."""
        if self._session is not None:
            self._session.end()
            self._session = None
            self._read.clear()

    def _start(self) -> Session:
        if self._said_is_kept:
            self._stderr.seek(0)
            self._stderr.truncate()
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._session = Session(self._command, cwd=self._folder, bufsize=0, **streams)
        _limit_memory(self._session.process.pid)
        return self._session

    def _send(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin
        rest = memoryview(line)
        while rest:
            rest = rest[process.stdin.write(rest) :]

    def _receive(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            if searched > LONGEST:
                raise Lost(f"a line of more than {LONGEST >> 20} MiB: {shown(self._read)}")
            part = process.stdout.read(2**16)
            if not part:
                raise EOFError
            self._read += part
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def _how_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        half = f"half a line: {shown(self._read)}; " if self._read else ""
        try:
            how = how_it_ended(process.wait(GONE))
        except subprocess.TimeoutExpired:
            how = "it closed its pipe and went on running"
        self.kill()
        return half + how + self._last_words()

    def _last_words(self) -> str:
        """The last line it wrote to its standard error."""
        if not self._said_is_kept:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f", after it said {lines[-1].strip()[:200]!r}" if lines else ""


def shown(text: bytes | bytearray) -> str:
    """The beginning of what it wrote."""
    whole = bytes(text[: SHOWN + 1]).decode(errors="replace")
    return repr(whole[:SHOWN] + "..." if len(text) > SHOWN else whole)


def _limit_memory(pid: int) -> None:
    """As much as a check in this process may have, where the system can say so (Linux)."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, (stricter(MEMORY, soft, hard), hard))
