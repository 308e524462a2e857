"""Adapter of Hugging Face transformers' `generate`: stateless, each call processes whole prompts with a new cache."""

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
    """options: arguments of `generate`. attention_by: the attention implementation."""

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
    """With prefill in chunks of ten tokens."""

    name = "transformers-generate-chunked"
    options: ClassVar[dict[str, Any]] = {"prefill_chunk_size": 10}


class Lookup(Generate):
    """With prompt lookup decoding: wrong drafts are removed from the cache."""

    name = "transformers-generate-lookup"
    options: ClassVar[dict[str, Any]] = {"prompt_lookup_num_tokens": 4}


class Assisted(Generate):
    """With assisted generation by a copy of the model, whose drafts are right."""

    name = "transformers-generate-assisted"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        model = model_of(canary, folder, self.attention_by)
        return Engine(canary, model, {"assistant_model": model})


class Fp8(Generate):
    """With a cache in E4M3FN and one scale per layer, for canaries that tolerate the rounding. It has no windows."""

    name = "transformers-generate-fp8"
    limits: ClassVar[dict[str, Any]] = {"engine": {"head_dim": 128, "window": 0}}
    options: ClassVar[dict[str, Any]] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        if not canary.survives("float8_e4m3fn"):
            raise NotOffered("a canary of these sizes: FP8 is not precise enough for it")
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
            raise NotOffered("drafts for a batch of several prompts")
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
    """The canary in float32, loaded by transformers from its folder. It keeps no state between calls, so it is shared."""
    torch.set_num_threads(1)  # for such small matrices, synchronizing threads costs more than they save
    if (canary, attention) not in _MODELS:
        architecture, model = ("mistral", MistralForCausalLM) if any(canary.windows) else ("llama", LlamaForCausalLM)
        files.write(folder, files.made(canary, architecture, "float32"))
        _MODELS[canary, attention] = model.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return _MODELS[canary, attention]
