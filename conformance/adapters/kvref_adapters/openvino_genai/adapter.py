"""Adapter of OpenVINO GenAI's continuous batching: a paged cache in C++. Requests share prefix blocks and queue for blocks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openvino
import openvino_genai
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from kvref.canary import EOS, Canary
from kvref.errors import OutOfBlocks, PositionOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_adapters.openvino_genai.llama_graph import llama_graph
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.outcome import NotOffered

BLOCK = 32  # tokens per block, on a CPU
BATCH = 48  # tokens computed together: fewer than some of the judge's prompts have
SPARE = 2  # blocks beyond those of one whole context: so few that concurrent requests have to wait for free blocks


class OpenVinoGenAI(EngineAdapter):
    """options: properties of the pipeline. shares: cache prefixes, in a small pool. asks: options of each request."""

    name = "openvino-genai"
    version = openvino_genai.__version__
    language = "c++"
    project = "openvino-genai"
    options: ClassVar[dict[str, Any]] = {"KV_CACHE_PRECISION": openvino.Type.f32}
    shares: ClassVar[bool] = False
    asks: ClassVar[dict[str, int]] = {}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "OpenVinoGenAIEngine":
        if any(canary.windows):
            raise NotOffered("windows: the hand-written graph has none")
        openvino.save_model(_model(canary), folder / "openvino_model.xml", compress_to_fp16=False)
        for name, document in (("config", {"model_type": "llama"}), ("generation_config", {"eos_token_id": EOS})):
            (folder / f"{name}.json").write_text(json.dumps(document))
        scheduled = SchedulerConfig()
        scheduled.num_kv_blocks = -(-cache_tokens // BLOCK)
        if self.shares:
            scheduled.enable_prefix_caching = True
            scheduled.max_num_batched_tokens = BATCH
            scheduled.num_kv_blocks = -(-canary.context // BLOCK) + SPARE
        hints = {"INFERENCE_PRECISION_HINT": openvino.Type.f32, "INFERENCE_NUM_THREADS": 1}
        return OpenVinoGenAIEngine(canary, ContinuousBatchingPipeline(folder, scheduled, "CPU", hints | self.options), self.asks)


class OpenVinoGenAIPrefix(OpenVinoGenAI):
    name = "openvino-genai-prefix"
    shares = True


class OpenVinoGenAIU8(OpenVinoGenAIPrefix):
    name = "openvino-genai-u8"
    options: ClassVar[dict[str, Any]] = {"KV_CACHE_PRECISION": openvino.Type.u8}


class OpenVinoGenAILookup(OpenVinoGenAI):
    """With prompt lookup decoding: drafts are copied from the prompt and verified several tokens at once."""

    name = "openvino-genai-lookup"
    options: ClassVar[dict[str, Any]] = OpenVinoGenAI.options | {"prompt_lookup": True}
    asks: ClassVar[dict[str, int]] = {"num_assistant_tokens": 5, "max_ngram_size": 3}


class OpenVinoGenAIEngine(WholePrompts):
    """One pipeline for all calls, so that prefix blocks are reused between calls."""

    def __init__(self, canary: Canary, pipeline: Any, asks: dict[str, int]) -> None:
        super().__init__(canary)
        self._pipeline, self._asks, self._asked = pipeline, asks, 0

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        handles = [self._begun(prompt, count) for prompt in prompts]
        self._finish()
        return [said for handle in handles for said in _answers(handle, count)]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """Generate as sequences of one request; each samples among one token (greedy)."""
        if self._asks:
            raise NotOffered("several completions per prompt together with prompt lookup")
        told = self._session_tokens(session, generates=True)
        n, count = in_range(n, None, PositionOutOfRange, "n"), in_range(count, None, PositionOutOfRange, "count")
        if not n or not count:
            return []
        self._check_room(told, count)
        handle = self._begun(told, count, do_sample=True, top_k=1, num_return_sequences=n)
        self._finish()
        return [token for said in _answers(handle, count) for token in said]

    def cancel(self, session: int, count: int) -> None:
        told = self._session_tokens(session, generates=True)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return
        self._check_room(told, count)
        handle = self._begun(told, count)
        for _ in range(count // 2):
            self._pipeline.step()
        handle.cancel()
        self._finish()

    def _begun(self, prompt: Sequence[int], count: int, **options: Any) -> Any:
        self._asked += 1
        asked = GenerationConfig(max_new_tokens=count, ignore_eos=True, **self._asks, **options)
        return self._pipeline.add_request(self._asked, openvino.Tensor(np.array([prompt], np.int64)), asked)

    def _finish(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _answers(handle: Any, count: int) -> list[list[int]]:
    """The tokens of each sequence of a request.

    Raises OutOfBlocks if the scheduler dropped the request and cut its output short.
    """
    said = [list(output.generated_ids) for output in handle.read_all()]
    if not said or any(len(tokens) < count for tokens in said):
        raise OutOfBlocks(f"{handle.get_status()}: expected {count} tokens, got {[len(tokens) for tokens in said]}")
    return said


_MODELS: dict[Canary, Any] = {}


def _model(canary: Canary) -> Any:
    """The canary as a graph. It keeps no state between two pipelines, so it is shared."""
    if canary not in _MODELS:
        _MODELS[canary] = llama_graph(canary)
    return _MODELS[canary]
