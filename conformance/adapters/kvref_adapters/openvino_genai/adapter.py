"""Adapters of OpenVINO GenAI's continuous batching: a paged cache in C++. Requests share prefix blocks and queue for blocks.

The canary is OpenVINO IR: the graph that optimum-intel exports for a Llama, without MLPs (a canary's are zero). It is built from
OpenVINO's own operations, so that neither torch nor transformers is needed. Keys and values are variables (ReadValue, Concat,
Assign); openvino_genai replaces each ScaledDotProductAttention after them with a PagedAttention.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openvino
import openvino_genai
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from kvref.canary import EOS, Canary, Weights, weights
from kvref.canary.dimensions import EPSILON
from kvref.errors import OutOfBlocks, PositionOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts


@cache
def llama_graph(canary: Canary) -> Any:
    """Return the model in float32, for any number of prompts of any length. Windows of the canary are ignored.

    It keeps no state between two pipelines, so it is shared.
    """
    return _LlamaGraph(canary).made()


class _LlamaGraph:
    """Builder of the graph.

    Shapes in comments: B prompts, S new tokens per prompt, T tokens in all, H heads, D numbers per head.
    """

    def __init__(self, canary: Canary) -> None:
        self._canary = canary
        self._weights: Weights = weights(canary)
        self._ids, self._mask, self._positions = (
            _named(op.parameter([-1, -1], np.int64), name) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self._beam = _named(op.parameter([-1], np.int32), "beam_idx")
        angle = op.matmul(
            op.unsqueeze(op.convert(self._positions, "f32"), _ints(2)),
            _floats(np.tile(canary.frequencies, 2)[None]), False, False,
        )  # [B, S, D]  # fmt: skip
        self._cos, self._sin = (op.unsqueeze(each, _ints(1)) for each in (op.cos(angle), op.sin(angle)))  # [B, 1, S, D]
        total = op.gather(op.shape_of(self._mask), _ints(1), _ints(0))
        seen = op.less_equal(op.range(_ints(0), total, _ints(1), "i64"), op.unsqueeze(self._positions, _ints(2)))
        self._bias = op.select(op.unsqueeze(seen, _ints(1)), _floats(0), _floats(-np.inf))  # [B, 1, S, T]
        self._assigned: list[Any] = []

    def made(self) -> Any:
        stream = op.gather(_floats(self._weights["model.embed_tokens.weight"]), self._ids, _ints(0))  # [B, S, hidden]
        for layer in range(self._canary.num_layers):
            stream = op.add(stream, self._attention(stream, layer))
        logits = self._linear(self._normed(stream, "model.norm"), "lm_head")
        inputs = [self._ids, self._mask, self._positions, self._beam]
        return openvino.Model([_named(op.result(logits), "logits")], self._assigned, inputs, "canary")

    def _attention(self, stream: Any, layer: int) -> Any:
        canary, name = self._canary, f"model.layers.{layer}"
        normed = self._normed(stream, f"{name}.input_layernorm")
        query, key, value = (
            self._heads(self._linear(normed, f"{name}.self_attn.{each}_proj"), count)
            for each, count in (("q", canary.num_query_heads), ("k", canary.num_kv_heads), ("v", canary.num_kv_heads))
        )
        keys, values = self._cached(self._turned(key), f"{layer}.key"), self._cached(value, f"{layer}.value")
        scale = _floats(canary.head_dim**-0.5)
        found = op.scaled_dot_product_attention(
            self._turned(query), self._repeated(keys), self._repeated(values), self._bias, scale, False
        )
        together = op.reshape(op.transpose(found, _ints([0, 2, 1, 3])), _ints([0, 0, -1]), True)
        return self._linear(together, f"{name}.self_attn.o_proj")

    def _linear(self, stream: Any, name: str) -> Any:
        return op.matmul(stream, _floats(self._weights[f"{name}.weight"]), False, True)

    def _normed(self, stream: Any, name: str) -> Any:
        square = op.reduce_mean(op.multiply(stream, stream), _ints([-1]), keep_dims=True)
        root = op.sqrt(op.add(square, _floats(EPSILON)))
        return op.multiply(op.multiply(stream, op.divide(_floats(1), root)), _floats(self._weights[f"{name}.weight"]))

    def _heads(self, flat: Any, count: int) -> Any:
        """[B, S, H * D] as [B, H, S, D]."""
        apart = op.reshape(flat, _ints([0, 0, count, self._canary.head_dim]), True)
        return op.transpose(apart, _ints([0, 2, 1, 3]))

    def _turned(self, heads: Any) -> Any:
        first, second = op.split(heads, _ints(3), 2).outputs()
        across = op.concat([op.multiply(second, _floats(-1)), first], 3)
        return op.add(op.multiply(heads, self._cos), op.multiply(across, self._sin))

    def _cached(self, new: Any, name: str) -> Any:
        """Concatenate a variable's tokens and the new tokens: [B, H, T, D]."""
        canary, info = self._canary, VariableInfo()
        info.data_shape = openvino.PartialShape([-1, canary.num_kv_heads, -1, canary.head_dim])
        info.data_type, info.variable_id = openvino.Type.f32, name
        variable = Variable(info)
        batch = op.gather(op.shape_of(self._ids), _ints([0]), _ints(0))
        none = op.broadcast(_floats(0), op.concat([batch, _ints([canary.num_kv_heads, 0, canary.head_dim])], 0))
        both = op.concat([op.gather(op.read_value(none, variable), self._beam, _ints(0)), new], 2)
        self._assigned.append(op.assign(both, variable))
        return both

    def _repeated(self, heads: Any) -> Any:
        """Repeat each KV head for each query head that reads it."""
        canary, shape = self._canary, op.shape_of(heads)
        group = canary.num_query_heads // canary.num_kv_heads
        if group == 1:
            return heads
        before, behind = (op.gather(shape, _ints(axes), _ints(0)) for axes in ([0, 1], [2, 3]))
        wide = op.broadcast(op.unsqueeze(heads, _ints(2)), op.concat([before, _ints([group]), behind], 0), "BIDIRECTIONAL")
        return op.reshape(wide, _ints([0, canary.num_query_heads, -1, canary.head_dim]), True)


def _ints(values: Any) -> Any:
    return op.constant(np.array(values, np.int64))


def _floats(values: Any) -> Any:
    return op.constant(np.array(values, np.float32))


def _named(node: Any, name: str) -> Any:
    """Name inputs twice: openvino_genai looks them up by friendly name or by tensor name."""
    node.friendly_name = name
    node.output(0).tensor.set_names({name})
    return node


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
        openvino.save_model(llama_graph(canary), folder / "openvino_model.xml", compress_to_fp16=False)
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
