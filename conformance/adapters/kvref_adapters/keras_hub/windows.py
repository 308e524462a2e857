"""Adapters of KerasHub's attention layers with a sliding window, each with a cache as long as the context.

One step makes the decoder's mask and calls the attention layer. Its projections pass their parts of the input on, and its rotary
embedding is the identity, so that the input is queries, keys and values side by side. The cache keeps all tokens and the caller
counts them, so stored tokens, reads and truncation are not offered.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvref_adapters._shared.torch_arrays import OneThreadTorch

os.environ.setdefault("KERAS_BACKEND", "torch")  # set before Keras is imported

import keras
import keras_hub
import numpy as np
import torch
from keras import ops
from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention
from keras_hub.src.models.gemma3.gemma3_decoder_block import Gemma3DecoderBlock
from keras_hub.src.models.gpt_oss.gpt_oss_attention import GptOssAttention
from keras_hub.src.models.gpt_oss.gpt_oss_decoder import GptOssTransformerDecoder
from keras_hub.src.models.mistral.mistral_attention import CachedMistralAttention
from keras_hub.src.models.mistral.mistral_transformer_decoder import MistralTransformerDecoder
from keras_hub.src.models.qwen3.qwen3_attention import Qwen3Attention
from keras_hub.src.models.qwen3.qwen3_decoder import Qwen3TransformerDecoder

from kvref_adapters._shared.attention import WINDOW_LIMITS, check_one_projection, check_queries, check_sizes
from kvref_conformance.exceptions import NotOffered

CONTEXT = 512  # the size of each cache in tokens
Mask = Callable[[int, Any, int], Any]  # arguments: number of queries, the cache, the position of the first query


class _KerasHubWindows(OneThreadTorch, ABC):
    version = f"{keras_hub.__version__}, keras {keras.__version__} on {keras.backend.backend()}"
    language = "python"
    project = "keras-hub"
    limits: ClassVar[Mapping[str, Any]] = WINDOW_LIMITS

    def windowed(self, **config: Any) -> "KerasHubWindowLayer":
        check_sizes(config)
        return KerasHubWindowLayer(config, self._mask(config["window"]), self._layer)

    @abstractmethod
    def _mask(self, window: int) -> Mask:
        """Return the mask function of a model's decoder."""

    @abstractmethod
    def _layer(self, num_query_heads: int, num_kv_heads: int, head_dim: int, window: int) -> Any:
        """Return the model's attention layer."""


def _of_decoder(decoder: Any) -> Mask:
    return lambda count, cache, at: decoder._compute_self_attention_mask(ops.zeros((1, count, 1)), None, None, cache, at)


class KerasHubMistral(_KerasHubWindows):
    name = "keras-hub-window-mistral"

    def _mask(self, window: int) -> Mask:
        return _of_decoder(MistralTransformerDecoder(8, 1, 1, sliding_window=window))

    def _layer(self, num_query_heads: int, num_kv_heads: int, head_dim: int, window: int) -> Any:
        return CachedMistralAttention(num_query_heads, num_kv_heads, sliding_window=window, head_dim=head_dim)


class KerasHubQwen3(_KerasHubWindows):
    name = "keras-hub-window-qwen3"

    def _mask(self, window: int) -> Mask:
        return _of_decoder(Qwen3TransformerDecoder(8, 1, 1, 8, sliding_window_size=window))

    def _layer(self, num_query_heads: int, num_kv_heads: int, head_dim: int, window: int) -> Any:
        return Qwen3Attention(num_query_heads, num_kv_heads, head_dim=head_dim, sliding_window_size=window)


class KerasHubGptOss(_KerasHubWindows):
    """Its logit sinks are set to minus infinity, which has no effect."""

    name = "keras-hub-window-gpt-oss"

    def _mask(self, window: int) -> Mask:
        return _of_decoder(GptOssTransformerDecoder(8, 1, 1, 2, 1, sliding_window=window))

    def _layer(self, num_query_heads: int, num_kv_heads: int, head_dim: int, window: int) -> Any:
        return GptOssAttention(num_query_heads, num_kv_heads, sliding_window=window, head_dim=head_dim)


class KerasHubGemma3(_KerasHubWindows):
    name = "keras-hub-window-gemma3"

    def _mask(self, window: int) -> Mask:
        decoder = Gemma3DecoderBlock(8, 8, 1, 1, 8)

        def mask(count: int, cache: Any, at: int) -> Any:
            return decoder._compute_attention_mask(ops.zeros((1, count, 1)), None, None, (cache[:, 0], cache[:, 1]), at)

        return mask

    def _layer(self, num_query_heads: int, num_kv_heads: int, head_dim: int, window: int) -> Any:
        layer = CachedGemma3Attention(
            head_dim, num_query_heads, num_kv_heads, use_sliding_window_attention=True, sliding_window_size=window
        )
        call = layer.call

        def as_the_others(x: Any, mask: Any, cache: Any, at: int) -> tuple[Any, Any]:
            out, cache = call(x, mask, (cache[:, 0], cache[:, 1]), at)
            return out, ops.stack(cache, axis=1)

        layer.call = as_the_others
        return layer


class KerasHubWindowLayer:
    def __init__(self, config: dict[str, Any], mask: Mask, made: Callable[..., Any]) -> None:
        self._config, self._mask, self._made = config, mask, made
        self._layers = dict[int, Any]()  # by the number of query heads
        self._cache = ops.zeros((1, 2, CONTEXT, config["num_kv_heads"], config["head_dim"]))
        self.length = 0

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        check_one_projection(keys, values, self._config)
        if self.length + len(keys) > CONTEXT:
            raise NotOffered(f"sequences of more than {CONTEXT} tokens")
        layer, mask = self._scaled(query.shape[1], scale), self._mask(len(keys), self._cache, self.length)
        with torch.no_grad():
            out, cache = layer.call(torch.cat([query, keys, values], dim=1)[None], mask, self._cache, self.length)
        self._cache, self.length = cache, self.length + len(keys)
        return out[0]

    def _scaled(self, num_query_heads: int, scale: float) -> Any:
        if num_query_heads not in self._layers:
            self._layers[num_query_heads] = self._made_of(num_query_heads)
        layer = self._layers[num_query_heads]
        layer._inv_norm_factor = scale
        layer.head_dim = scale**-2  # Gemma computes its scale from head_dim
        return layer

    def _made_of(self, heads: int) -> Any:
        _, _, _, num_kv_heads, head_dim = self._cache.shape
        layer = self._made(heads, num_kv_heads, head_dim, self._config["window"])
        layer.build((1, 1, heads * head_dim))
        through = {
            "query_dense": lambda x: x[:, :, :heads], "key_dense": lambda x: x[:, :, heads : heads + num_kv_heads],
            "value_dense": lambda x: x[:, :, heads + num_kv_heads :], "output_dense": lambda x: x,
            "query_dense_layer_norm": lambda x: x, "key_dense_layer_norm": lambda x: x,
        }  # fmt: skip
        for name, function in through.items():
            for attribute in (name, f"_{name}"):
                if hasattr(layer, attribute):
                    # bypasses the attribute check of PyTorch modules, which rejects functions
                    object.__setattr__(layer, attribute, function)
        turned = "rope_layer" if hasattr(layer, "rope_layer") else "rotary_embedding_layer"
        object.__setattr__(layer, turned, lambda x, start_index=0: x)
        if hasattr(layer, "sinks"):
            layer.sinks.assign(np.full(layer.sinks.shape, -np.inf, np.float32))
        return layer
