"""Adapter of CTranslate2's Generator: stateless, each call processes whole prompts with a new cache."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import ctranslate2
from ctranslate2.converters import TransformersConverter

from kvref.canary import Canary
from kvref_adapters._shared.canary_files import EngineAdapter, load_once, write_canary
from kvref_canary.files.vocabulary import vocabulary
from kvref_conformance.families.engine.stateless_adapter import WholePrompts


class CTranslate2(EngineAdapter):
    """options: arguments of `generate_batch`."""

    name = "ctranslate2"
    version = ctranslate2.__version__
    language = "c++"
    project = "ctranslate2"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "CTranslate2Engine":
        return CTranslate2Engine(canary, _model(canary, folder), self.options)


class CTranslate2Beams(CTranslate2):
    name = "ctranslate2-beams"
    options: ClassVar[dict[str, Any]] = {"beam_size": 3}


class CTranslate2Engine(WholePrompts):
    """`generate_batch` prefills only as many tokens together as the shortest prompt of the batch has."""

    def __init__(self, canary: Canary, model: Any, options: dict[str, Any]) -> None:
        super().__init__(canary)
        self._model, self._options, self._words = model, options, vocabulary(canary)

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        told = [[self._words[token] for token in prompt] for prompt in prompts]
        said = self._model.generate_batch(
            told, max_length=count, min_length=count, include_prompt_in_result=False, sampling_topk=1, **self._options
        )
        return [list(result.sequences_ids[0]) for result in said]


@load_once
def _model(canary: Canary, folder: Path) -> Any:
    """The canary in float32, converted by CTranslate2's own converter."""
    write_canary(canary, folder)
    with tempfile.TemporaryDirectory(prefix="canary-ctranslate2") as converted:
        TransformersConverter(str(folder)).convert(converted, force=True)
        return ctranslate2.Generator(converted, compute_type="float32", inter_threads=1, intra_threads=1)
