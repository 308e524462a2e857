"""Adapters of llama-cpp-python's `Llama`: whole prompts in turn, on one sequence that keeps the longest common prefix."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from kvref.canary import Canary
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_canary.files import gguf
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts


class LlamaCppPython(EngineAdapter):
    """The library's defaults: a cache of float16."""

    name = "llama-cpp-python"
    version = llama_cpp.__version__
    language = "python"
    project = "llama-cpp-python"
    drafts = states = False

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "LlamaCppPythonEngine":
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        file = folder / "canary.gguf"
        gguf.write_gguf(file, gguf.gguf_file(canary, "float32"))
        drafts = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=4)} if self.drafts else {}
        llama = llama_cpp.Llama(str(file), n_ctx=canary.context, n_threads=1, n_threads_batch=1, verbose=False, **drafts)
        return LlamaCppPythonEngine(canary, llama, self.states)


class LlamaCppPythonLookup(LlamaCppPython):
    """With drafts that are looked up in the prompt."""

    name = "llama-cpp-python-lookup"
    drafts = True


class LlamaCppPythonStates(LlamaCppPython):
    """With a `LlamaRAMCache`: the state with the longest common prefix is loaded first, as `create_completion` does."""

    name = "llama-cpp-python-states"
    states = True


class LlamaCppPythonEngine(WholePrompts):
    def __init__(self, canary: Canary, llama: Any, states: bool) -> None:
        super().__init__(canary)
        self._llama, self._states = llama, llama_cpp.LlamaRAMCache() if states else None

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        return [self._complete(list(prompt), count) for prompt in prompts]

    def _complete(self, prompt: list[int], count: int) -> list[int]:
        if self._states is not None and prompt in self._states:
            state = self._states[prompt]
            stored, current = (self._llama.longest_token_prefix(tokens.tolist(), prompt) for tokens in
                               (state.input_ids[: state.n_tokens], self._llama.input_ids[: self._llama.n_tokens]))  # fmt: skip
            if stored > current:
                self._llama.load_state(state)
        output = list(islice(self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0), count))
        if self._states is not None:
            self._states[prompt + output] = self._llama.save_state()
        return output
