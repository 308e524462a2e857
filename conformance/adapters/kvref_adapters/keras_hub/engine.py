"""Adapter of KerasHub's `generate`: stateless, a batch of whole prompts that always generates to the end of the context."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "jax")  # set before Keras is imported

import keras
import keras_hub

from kvref.canary import Canary
from kvref_adapters._shared.canary_files import EngineAdapter, load_once, write_canary
from kvref_conformance.families.engine.stateless_adapter import WholePrompts


class KerasHubGenerate(EngineAdapter):
    name = "keras-hub"
    version = f"{keras_hub.__version__}, keras {keras.__version__} on {keras.backend.backend()}"
    language = "python"
    project = "keras-hub"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "KerasHubEngine":
        return KerasHubEngine(canary, _model(canary, folder))


class KerasHubEngine(WholePrompts):
    def __init__(self, canary: Canary, model: Any) -> None:
        super().__init__(canary)
        self._model = model

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Generates to the end of the context, because KerasHub compiles each length separately."""
        told = np.zeros((len(prompts), self.canary.context), np.int32)
        for row, prompt in zip(told, prompts, strict=True):
            row[: len(prompt)] = prompt
        mask = np.arange(self.canary.context) < np.array([[len(prompt)] for prompt in prompts])
        said = self._model.generate({"token_ids": told, "padding_mask": mask.astype(np.int32)}, stop_token_ids=None)["token_ids"]
        return [row[len(prompt) :][:count].tolist() for row, prompt in zip(np.asarray(said), prompts, strict=True)]


@load_once
def _model(canary: Canary, folder: Path) -> Any:
    """The canary in float32, loaded by KerasHub from Hugging Face's folder."""
    write_canary(canary, folder)
    kind = keras_hub.models.MistralCausalLM if any(canary.windows) else keras_hub.models.Llama3CausalLM
    model = kind.from_preset(str(folder), preprocessor=None, dtype="float32")
    model.compile(sampler="greedy")
    return model
