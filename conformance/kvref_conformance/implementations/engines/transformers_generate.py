"""Hugging Face transformers' `generate`, as an engine: whole prompts, with a cache of its own for each call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import LlamaForCausalLM, MistralForCausalLM

from kvref.canary import UNKNOWN, Canary
from kvref_conformance.canary import folder as files
from kvref_conformance.families.engine.whole import WholePrompts
from kvref_conformance.implementations.engines.loading import Loads
from kvref_conformance.outcome import NotOffered


class Generate(Loads):
    """options: of `generate`. attention_by: how it computes."""

    name = "transformers-generate"
    version = transformers.__version__
    language = "python"
    project = "transformers"
    attention_by: ClassVar[str] = "eager"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        return Engine(canary, model_of(canary, folder, self.attention_by), self.options)


class Static(Generate):
    name = "transformers-generate-static"
    options: ClassVar[dict[str, Any]] = {"cache_implementation": "static", "disable_compile": True}


class Beams(Generate):
    name = "transformers-generate-beams"
    options: ClassVar[dict[str, Any]] = {"num_beams": 3}


class Chunked(Generate):
    """The prompt in pieces of ten tokens."""

    name = "transformers-generate-chunked"
    options: ClassVar[dict[str, Any]] = {"prefill_chunk_size": 10}


class Lookup(Generate):
    """Drafts, looked up in the prompt, of which it takes back what is wrong."""

    name = "transformers-generate-lookup"
    options: ClassVar[dict[str, Any]] = {"prompt_lookup_num_tokens": 4}


class Assisted(Generate):
    """Drafts by a model like itself, which are right."""

    name = "transformers-generate-assisted"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        model = model_of(canary, folder, self.attention_by)
        return Engine(canary, model, {"assistant_model": model})


class Fp8(Generate):
    """A cache of E4M3FN with one scale a layer, for canaries that survive it. It has no windows."""

    name = "transformers-generate-fp8"
    limits: ClassVar[dict[str, Any]] = {"engine": {"head_dim": 128, "window": 0}}
    options: ClassVar[dict[str, Any]] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        if not canary.survives("float8_e4m3fn"):
            raise NotOffered("a canary of these sizes in a cache of FP8")
        return super().loaded(canary, folder, cache_tokens)


class Sdpa(Generate):
    name = "transformers-generate-sdpa"
    attention_by = "sdpa"


class Engine(WholePrompts):
    def __init__(self, canary: Canary, model: Any, options: dict[str, Any]) -> None:
        super().__init__(canary)
        self._model, self._options = model, options

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        if len(prompts) > 1 and self._options.keys() & {"prompt_lookup_num_tokens", "assistant_model"}:
            raise NotOffered("drafts for several prompts at once")
        padded = [[UNKNOWN] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.no_grad():
            said = self._model.generate(
                torch.tensor(padded), attention_mask=torch.tensor(seen), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, **self._options,
            )  # fmt: skip
        return [row[longest:].tolist() for row in said]


_MODELS: dict[tuple[Canary, str], Any] = {}


def model_of(canary: Canary, folder: Path, attention: str) -> Any:
    """In float32, the model that transformers makes of the canary's folder. It keeps nothing between two calls."""
    torch.set_num_threads(1)  # threads that share such small matrices wait for each other longer than they compute
    if (canary, attention) not in _MODELS:
        architecture, model = ("mistral", MistralForCausalLM) if any(canary.windows) else ("llama", LlamaForCausalLM)
        files.write(folder, files.made(canary, architecture, "float32"))
        _MODELS[canary, attention] = model.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return _MODELS[canary, attention]
