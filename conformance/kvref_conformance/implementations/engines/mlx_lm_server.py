"""mlx-lm's own server, over HTTP, as an engine: whole texts, whose beginnings it keeps in a prompt cache between requests."""

import atexit
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx_lm

from kvref.canary import Canary
from kvref_conformance.canary import folder as files
from kvref_conformance.canary.words import text, tokens
from kvref_conformance.families.engine.whole import WholePrompts
from kvref_conformance.implementations.engines.loading import Loads

PATIENCE = 60  # seconds, for a server to begin and to answer


class Server(Loads):
    """drafts: whether another model says what may come next. The server goes on between engines of one canary."""

    name = "mlx-lm-server"
    version = f"{mlx_lm.__version__}, mlx {mx.__version__}"
    language = "python"
    drafts: ClassVar[bool] = False

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        return Engine(canary, self.drafts)


class Drafted(Server):
    name = "mlx-lm-server-draft"
    drafts = True


class Engine(WholePrompts):
    def __init__(self, canary: Canary, drafts: bool) -> None:
        super().__init__(canary)
        self._kind = canary, drafts
        if self._kind not in _RUNNING:
            _RUNNING[self._kind] = Running(canary, drafts)
        self._url = _RUNNING[self._kind].url

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        def one(prompt: Sequence[int]) -> list[int]:
            return tokens(self.canary, _ask(self._url, text(self.canary, prompt), count))

        try:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return list(pool.map(one, prompts))
        except (OSError, RuntimeError):
            _RUNNING.pop(self._kind).stop()  # it may answer no more: the next engine has one of its own
            raise


class Running:
    """A server of its own process, at a port that was free."""

    def __init__(self, canary: Canary, drafts: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="canary")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        models = ["--model", _written(canary, Path(self._folder.name, "model"))]
        if drafts:
            models += ["--draft-model", _written(_draft(canary), Path(self._folder.name, "draft"))]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mlx_lm", "server", *models, "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.stop)
        self._wait()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=PATIENCE).close()
                return
            except urllib.error.URLError:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.1)


_RUNNING: dict[tuple[Canary, bool], Running] = {}


def _draft(canary: Canary) -> Canary:
    """One that looks a token too far back, and is wrong nearly always; where that is no canary, the same."""
    if canary.recalls or any(canary.windows):
        return canary
    return replace(canary, offsets=(*canary.offsets[:-1], canary.offsets[-1] + 1))


def _written(canary: Canary, folder: Path) -> str:
    files.write(folder, files.made(canary, "mistral" if any(canary.windows) else "llama", "float32"))
    return str(folder)


def _ask(url: str, prompt: str, count: int) -> str:
    """Raises RuntimeError with what the server says where it does not answer."""
    body = json.dumps({"prompt": prompt, "max_tokens": count, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            said: Any = json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode(errors="replace")) from None
    return str(said["choices"][0]["text"])
