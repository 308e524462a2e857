"""Adapters of Hugging Face transformers' attention functions, which its models call over the keys and values of a cache.

`transformers-eager` is `eager_attention_forward` of Llama, and of gpt-oss if there are logit sinks; `transformers-sdpa` is
`sdpa_attention_forward`. Masks come from the library's mask functions (`ALL_MASK_ATTENTION_FUNCTIONS`): causal, window and chunk.
Tokens past the length are marked as padding in its 2D mask.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_forward
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_forward

from kvref.errors import ShapeMismatch
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered


class _TransformersAttention(TorchArrays):
    version = transformers.__version__
    language = "python"
    project = "transformers"


class TransformersEager(_TransformersAttention):
    name = "transformers-eager"

    def attention(self) -> "TransformersAttentionWithSinks":
        return TransformersAttentionWithSinks("eager", llama_forward)


class TransformersSdpa(_TransformersAttention):
    name = "transformers-sdpa"

    def attention(self) -> "TransformersAttention":
        return TransformersAttention("sdpa", sdpa_attention_forward)


class TransformersAttention:
    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self._mask, self._forward = ALL_MASK_ATTENTION_FUNCTIONS[name], forward

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(self._forward, query, keys, values, scale, _rule(causal), length)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks:
            raise NotOffered("sink tokens")
        chunks = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long)) if chunk else None
        rule = chunks or sliding_window_causal_mask_function(window)
        return self._attend(self._forward, query, keys, values, scale, rule, len(keys), chunk or window)

    def _attend(
        self, forward: Any, query: Any, keys: Any, values: Any, scale: float, rule: Any, length: int,
        local: int | None = None, **module: Any,
    ) -> Any:  # fmt: skip
        count = len(keys)
        mask = self._mask(
            batch_size=1, q_length=len(query), kv_length=count, q_offset=length - len(query), mask_function=rule,
            attention_mask=(torch.arange(count) < length)[None], local_size=local, dtype=torch.float32,
            allow_is_causal_skip=rule is not bidirectional_mask_function,
            allow_is_bidirectional_skip=rule is bidirectional_mask_function,
        )  # fmt: skip
        try:
            layer = SimpleNamespace(
                num_key_value_groups=query.shape[1] // keys.shape[1], is_causal=rule is not bidirectional_mask_function,
                training=False, **module,
            )  # fmt: skip
            given = [array.transpose(0, 1)[None] for array in (query, keys, values)]
            return forward(layer, *given, mask, scaling=scale)[0][0]
        except (RuntimeError, IndexError, ValueError) as error:
            raise ShapeMismatch(str(error)) from error


class TransformersAttentionWithSinks(TransformersAttention):
    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attend(gpt_oss_forward, query, keys, values, scale, _rule(causal), len(keys), sinks=logit_sink)


def _rule(causal: bool) -> Any:
    return causal_mask_function if causal else bidirectional_mask_function
