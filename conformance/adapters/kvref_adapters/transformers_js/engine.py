"""Adapter of transformers.js in a Node subprocess: whole prompts, left-padded, with its DynamicCache."""

import atexit
import itertools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvref.canary import Canary
from kvref.errors import PositionOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_adapters.transformers_js.onnx_graph import onnx_model
from kvref_canary.files import huggingface as files
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.outcome import NotOffered

PACKAGE = "@huggingface/transformers"
NODE = shutil.which("node")
PROGRAM = Path(__file__).with_suffix(".cjs")
VERSION = f"require(require('node:path').join(require.resolve('{PACKAGE}'), '../../package.json')).version"


def _version() -> str:
    """Return the version of the package that Node finds. Raises ImportError."""
    if NODE is None:
        raise ImportError("transformers.js needs node")
    found = subprocess.run([NODE, "-p", VERSION], capture_output=True, text=True, check=False, cwd="/")
    if found.returncode:
        raise ImportError(f"transformers.js needs the npm package {PACKAGE} in NODE_PATH")
    return found.stdout.strip()


class TransformersJsGenerate(EngineAdapter):
    name = "transformers.js"
    version = _version()
    language = "javascript"
    project = "transformers.js"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersJsEngine":
        return TransformersJsEngine(canary, folder)


class TransformersJsCached(TransformersJsGenerate):
    """With sessions: each keeps a DynamicCache between calls, and a fork receives a copy."""

    name = "transformers.js-cached"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersJsEngine":
        return TransformersJsSessionEngine(canary, folder)


class TransformersJsEngine(WholePrompts):
    def __init__(self, canary: Canary, folder: Path) -> None:
        super().__init__(canary)
        self._caches: dict[int, int] = {}
        files.write(folder, files.made(canary, "mistral" if any(canary.windows) else "llama", "float32"))
        (folder / "onnx").mkdir()
        (folder / "onnx/model.onnx").write_bytes(onnx_model(canary))
        self._node = _node()
        self._model = self._node.ask(load=str(folder))["model"]

    def complete(self, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
        said: list[list[int]] = self._node.ask(model=self._model, prompts=prompts, count=count, **options)["said"]
        return said


class TransformersJsSessionEngine(TransformersJsEngine):
    def open(self) -> int:
        session = super().open()
        self._caches[session] = next(_NAMES)
        return session

    def close(self, session: int) -> None:
        super().close(session)
        self._node.ask(forget=self._caches.pop(session))

    def fork(self, session: int) -> int:
        told = self._session_tokens(session)
        child = self.open()
        self._tokens[child] = list(told)
        self._node.ask(copy=self._caches[session], to=self._caches[child])
        return child

    def generate(self, session: int, count: int) -> list[int]:
        told = self._session_tokens(session, generates=True)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return []
        self._check_room(told, count)
        (said,) = self.complete([told], count, cache=self._caches[session])
        told += said
        return said

    def step(self, sessions: Sequence[int]) -> list[int]:
        if len(sessions) > 1:
            raise NotOffered("batches of caches")
        return [self.generate(session, 1)[0] for session in sessions]


class NodeProcess:
    def __init__(self) -> None:
        self._process = subprocess.Popen([str(NODE), PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.stop)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request to Node. Raises RuntimeError if it fails there.

        If the call is interrupted, Node is stopped, because the pending reply would be taken for that of the next request.
        """
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except BaseException:
            self.stop()
            raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


_RUNNING: list[NodeProcess] = []
_NAMES = itertools.count()  # of caches, unique among engines


def _node() -> NodeProcess:
    """Return the running Node process, or start one."""
    if not _RUNNING or not _RUNNING[-1].runs:
        _RUNNING.append(NodeProcess())
    return _RUNNING[-1]
