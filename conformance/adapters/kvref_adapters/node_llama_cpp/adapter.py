"""Adapters of node-llama-cpp (npm): whole prompts on a few sequences of one context, each of which keeps the common prefix."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvref.canary import Canary
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_adapters._shared.node_process import package_version, running_node
from kvref_canary.files import gguf
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts

PROGRAM = Path(__file__).with_name("engine.cjs")
SEQUENCES = 4


class NodeLlamaCpp(EngineAdapter):
    """drafts: whether tokens are drafted by a lookup in the prompt."""

    name = "node-llama-cpp"
    version = package_version("node-llama-cpp")
    language = "javascript"
    project = "node-llama-cpp"
    formats: ClassVar[tuple[str, ...]] = ("float16",)
    drafts: ClassVar[bool] = False

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "NodeLlamaCppEngine":
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        if not canary.survives("float16"):
            raise NotOffered("a canary of these sizes: float16 is not precise enough for it")
        file = folder / "canary.gguf"
        gguf.write_gguf(file, gguf.gguf_file(canary, "float32"))
        return NodeLlamaCppEngine(canary, file, self.drafts)


class NodeLlamaCppLookup(NodeLlamaCpp):
    """With an `InputLookupTokenPredictor` per sequence."""

    name = "node-llama-cpp-lookup"
    drafts = True


class NodeLlamaCppEngine(WholePrompts):
    def __init__(self, canary: Canary, file: Path, drafts: bool) -> None:
        super().__init__(canary)
        self._node = running_node(PROGRAM)
        made = self._node.ask(load=str(file), context=canary.context, sequences=SEQUENCES, drafts=drafts, canary=repr(canary))
        self._model = made["model"]

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        asked = [[int(token) for token in prompt] for prompt in prompts]
        said: list[list[int]] = self._node.ask(model=self._model, prompts=asked, count=count)["said"]
        return said
