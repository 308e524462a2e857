"""Base class of adapters of third-party servers: start a server with a canary in a subprocess, and judge it over HTTP."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import httpx

from kvref.canary import BOS, FIRST_WORD, Canary
from kvref_adapters._shared import die_with_parent
from kvref_adapters._shared.canary_files import EngineAdapter, write_canary
from kvref_canary.server.errors import ServerError
from kvref_canary.server.url import Address
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.implementations.server import ServerImplementation, ServerSessions

LOADING = 503  # the status that some servers return until they are ready
SILENCE = 60.0  # seconds without a byte after which a request counts as hung
MOST = 2  # servers of one kind that run at once, each with another canary


class ServerAdapter(EngineAdapter):
    """An adapter whose engines share one server per canary. A server that no longer answers is restarted."""

    starting: ClassVar[float] = 100.0  # seconds until a server must answer

    def __init__(self) -> None:
        self._running: dict[Canary, ServerProcess] = {}  # in order of last use, the newest last

    @abstractmethod
    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        """Return the command that serves a canary at a local port. folder: with the canary's files; other files may be added."""

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> WholePrompts:
        running = self._running.pop(canary, None)
        if running is not None and not running.answers():
            running.stop()
            running = None
        while len(self._running) >= MOST:
            self._running.pop(next(iter(self._running))).stop()
        try:
            self._running[canary] = running or ServerProcess(self, canary)
        except ServerNotUsable as error:
            return FailingSessions(canary, str(error))
        return self._running[canary].sessions()


class ServerNotUsable(Exception):
    """Raised if a server's first tokens are wrong, so that its sessions cannot be judged. The message is the reason."""


class FailingSessions(WholePrompts):
    """Sessions of a server that raised NotServed: every completion raises the reason, so that the clauses fail with it."""

    def __init__(self, canary: Canary, why: str) -> None:
        super().__init__(canary)
        self._why = why

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        raise RuntimeError(self._why)


class ServerProcess:
    """A server in a process group of its own, at a free port. The processes end when this process ends."""

    def __init__(self, server: ServerAdapter, canary: Canary) -> None:
        """Raises RuntimeError if the server does not start, NotServed if its first tokens are wrong."""
        self._holder = tempfile.TemporaryDirectory(prefix="canary")
        folder = Path(self._holder.name, "canary")
        write_canary(canary, folder)
        self._said = Path(self._holder.name, "said")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/v1"
        command = [sys.executable, die_with_parent.__file__, *server.command(canary, folder, port)]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        try:
            self._wait(server.starting)
            self._served = ServerImplementation(Address(self._url, folder), SILENCE)
        except CannotRun as error:
            self._end()
            raise ServerNotUsable(str(error)) from None
        except BaseException:
            self._end()
            raise

    def sessions(self) -> ServerSessions:
        return self._served.sessions()

    def answers(self) -> bool:
        """Whether the server still generates a token after a short prompt."""
        prompt = [BOS, FIRST_WORD]
        try:
            self._served.background.run(self._served.asker.complete(prompt, 1))
        except ServerError:
            return False
        return True

    def stop(self) -> None:
        self._served.close()
        self._end()

    def _end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._holder.cleanup()

    def _wait(self, starting: float) -> None:
        """Wait until the server answers with another status than 503 (loading). Raises RuntimeError."""
        end = time.monotonic() + starting
        while self._process.poll() is None and time.monotonic() < end:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self._url}/models", trust_env=False, timeout=starting).status_code != LOADING:
                    return
            time.sleep(0.1)
        lines = self._said.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise RuntimeError(f"the server did not start; its last output: {last}")
