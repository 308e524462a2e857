"""Adapters of llama.node (npm @fugood/llama.node, with the C++ code of llama.rn): one sequence, slots, and files of states."""

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvref.canary import BOS, FIRST_WORD, Canary
from kvref.canary.hybrid import AnyCanary, HybridCanary
from kvref.errors import PositionOutOfRange, SequenceNotFound, in_range
from kvref_adapters._shared.canary_files import EngineAdapter, hybrid_limits
from kvref_adapters._shared.node_process import package_version, running_node
from kvref_canary.files import gguf, vocabulary
from kvref_canary.files.hybrid_gguf import hybrid_gguf_file
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts

PROGRAM = Path(__file__).with_name("engine.cjs")
SLOTS = 4
REPLIES = 3  # the file descriptor of the replies, because the package prints its log to stdout


_FILES = tempfile.TemporaryDirectory(prefix="canaries")


def _kept_file(canary: AnyCanary) -> Path:
    """Return the path of a canary's file, which Node may load again later."""
    return Path(_FILES.name, f"{abs(hash(canary))}.gguf")


class LlamaNode(EngineAdapter):
    """`completion`: one sequence, which keeps the common prefix of its tokens and the next prompt."""

    name = "llama.node"
    version = package_version("@fugood/llama.node")
    language = "c++, javascript"
    project = "llama.node"
    formats: ClassVar[tuple[str, ...]] = ("float16",)
    slots: ClassVar[int] = 0
    sessions: ClassVar[type["LlamaNodeEngine"]]

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "LlamaNodeEngine":
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        if not canary.survives("float16"):
            raise NotOffered("a canary of these sizes: float16 is not precise enough for it")
        return self._made(canary, folder, gguf.gguf_file(canary, "float32"))

    def loaded_hybrid(self, canary: HybridCanary, folder: Path, cache_tokens: int) -> "LlamaNodeEngine":
        return self._made(canary, folder, hybrid_gguf_file(canary.architecture, "float32"))

    def _made(self, canary: AnyCanary, folder: Path, data: bytes) -> "LlamaNodeEngine":
        file = _kept_file(canary)
        if not file.exists():
            gguf.write_gguf(file, data)
        return self.sessions(canary, file, self.slots)


class LlamaNodeEngine(WholePrompts):
    def __init__(self, canary: AnyCanary, file: Path, slots: int) -> None:
        super().__init__(canary)
        self._slots, self._node = slots, running_node(PROGRAM, REPLIES)
        made = self._node.ask(load=str(file), context=canary.context, slots=slots, canary=repr(canary))
        self._model = made["model"]

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        return self._completed(prompts, count, [{} for _ in prompts])

    def cancel(self, session: int, count: int) -> None:
        tokens = self._session_tokens(session, generates=True)
        self._check_room(tokens, in_range(count, None, PositionOutOfRange, "count"))
        if count:
            self._node.ask(model=self._model, cancel=self._text(tokens), count=count, state=self._state(session))

    def _state(self, session: int) -> dict[str, object]:
        """Return the part of the file that a completion in a session loads."""
        return {}

    def _completed(self, prompts: Sequence[Sequence[int]], count: int, states: Sequence[dict[str, object]]) -> list[list[int]]:
        if not count:
            return [[] for _ in prompts]
        asked = [self._text(prompt) for prompt in prompts]
        said = self._node.ask(model=self._model, prompts=asked, count=count, states=states)["said"]
        return [vocabulary.to_tokens(self.canary, text) for text in said]

    def _text(self, prompt: Sequence[int]) -> str:
        """Return the prompt as text. `completion` adds the first token; with slots, it is part of the text."""
        if prompt[0] != BOS or any(token < FIRST_WORD - 1 for token in prompt[1:]):
            raise NotOffered("prompts that are not <s> and words, because they are sent as text")
        return vocabulary.to_text(self.canary, prompt[0 if self._slots else 1 :])


class LlamaNodeParallel(LlamaNode):
    """`parallel.completion`: requests in several slots, which share each batch."""

    name = "llama.node-parallel"
    slots = SLOTS


@dataclass(frozen=True)
class StateFile:
    """The first `size` tokens of a file of `save_state_path`; None: of no file."""

    path: Path | None = None
    size: int = 0


class StateFileEngine(LlamaNodeEngine):
    """Each session has a file of its state, which the next completion loads, in whichever slot."""

    def __init__(self, canary: AnyCanary, file: Path, slots: int) -> None:
        super().__init__(canary, file, slots)
        self._folder = tempfile.TemporaryDirectory(prefix="states")
        self._numbers = itertools.count()
        self._files: dict[int, StateFile] = {}
        self._saved: dict[int, tuple[list[int], StateFile]] = {}
        self._asking: Sequence[int] = ()

    def open(self) -> int:
        return self._begin([], StateFile())

    def close(self, session: int) -> None:
        super().close(session)
        del self._files[session]

    def generate(self, session: int, count: int) -> list[int]:
        self._asking = [session]
        return super().generate(session, count)

    def step(self, sessions: Sequence[int]) -> list[int]:
        self._asking = sessions
        return super().step(sessions)

    def sample(self, session: int, n: int, count: int) -> list[int]:
        tokens = self._session_tokens(session, generates=True)
        self._check_room(tokens, in_range(count, None, PositionOutOfRange, "count"))
        times = in_range(n, None, PositionOutOfRange, "n")
        said = self._completed([tokens] * times, count, [self._state(session)] * times)
        return [token for each in said for token in each]

    def fork(self, session: int) -> int:
        return self._begin(list(self._session_tokens(session)), self._files[session])

    def truncate(self, session: int, length: int) -> None:
        tokens = self._session_tokens(session)
        del tokens[in_range(length, len(tokens) + 1, PositionOutOfRange, "length") :]
        file = self._files[session]
        self._files[session] = StateFile(file.path, min(file.size, length))

    def save(self, session: int) -> int:
        self._saved[len(self._saved)] = list(self._session_tokens(session)), self._files[session]
        return len(self._saved) - 1

    def load(self, saved: int) -> int:
        if saved not in self._saved:
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        tokens, file = self._saved[saved]
        return self._begin(list(tokens), file)

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        files = [Path(self._folder.name, str(next(self._numbers))) for _ in prompts]
        states = [self._state(session) | {"save": str(file)} for session, file in zip(self._asking, files, strict=True)]
        said = self._completed(prompts, count, states)
        for session, prompt, file in zip(self._asking, prompts, files, strict=True):
            if file.exists():
                self._files[session] = StateFile(file, len(prompt) + count)
        return said

    def _state(self, session: int) -> dict[str, object]:
        file = self._files[session]
        return {"load": str(file.path), "size": file.size} if file.path and file.size else {}

    def _begin(self, tokens: list[int], file: StateFile) -> int:
        session = super().open()
        self._tokens[session], self._files[session] = tokens, file
        return session


class LlamaNodeStates(LlamaNodeParallel):
    name = "llama.node-states"
    sessions = StateFileEngine


LlamaNode.sessions = LlamaNodeEngine


class LlamaNodeLfm2(LlamaNode):
    """With recurrent state, of which snapshots are kept in memory for later prompts."""

    name = "llama.node-lfm2"
    limits: ClassVar[dict[str, object]] = hybrid_limits("lfm2")


class LlamaNodeQwen35(LlamaNode):
    name = "llama.node-qwen3.5"
    limits: ClassVar[dict[str, object]] = hybrid_limits("qwen3.5")


class LlamaNodeLfm2States(LlamaNodeStates):
    name = "llama.node-lfm2-states"
    limits: ClassVar[dict[str, object]] = hybrid_limits("lfm2")


class LlamaNodeQwen35States(LlamaNodeStates):
    name = "llama.node-qwen3.5-states"
    limits: ClassVar[dict[str, object]] = hybrid_limits("qwen3.5")
