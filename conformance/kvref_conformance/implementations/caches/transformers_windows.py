"""Adapters of Hugging Face transformers' cache layers with a sliding window and with chunks.

One step is the library's own mask for the cache, `update`, and SDPA as the library calls it, in a model's order. Stored tokens
are those that the next step would read. The adapter validates nothing.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers import DynamicCache, Llama4TextConfig, MistralConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

from kvref.errors import DtypeMismatch, NotTruncatable, PositionOutOfRange, ShapeMismatch
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, taken
from kvref_conformance.interface import Level

LONGEST = 2**20  # the maximum length that a static cache is given; it allocates memory for its window only


class _Windows:
    version = transformers.__version__
    language = "python"
    project = "transformers"
    level: Level = "exact"
    formats = ("float32",)  # a cache stores the given dtype without a cast
    limits: ClassVar[Mapping[str, Any]] = LIMITS

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class Dynamic(_Windows):
    name = "transformers-window"

    def windowed(self, **config: Any) -> "OneLayer":
        model = _of_a_window(config)
        return Growing(model, DynamicCache(config=model), create_sliding_window_causal_mask, config)


class Recording(_Windows):
    """As in assisted generation: new tokens are kept until the next `crop`."""

    name = "transformers-window-recording"

    def windowed(self, **config: Any) -> "OneLayer":
        model = _of_a_window(config)
        cache = DynamicCache(config=model)
        cache.activate_past_recording()
        return Recorded(model, cache, create_sliding_window_causal_mask, config)


class Static(_Windows):
    name = "transformers-window-static"

    def windowed(self, **config: Any) -> "OneLayer":
        model = _of_a_window(config)
        return OneLayer(model, StaticCache(model, max_cache_len=LONGEST), create_sliding_window_causal_mask, config)


class Chunked(_Windows):
    """Llama 4's: a query sees its own chunk. A window of a chunk's size removes nothing from it."""

    name = "transformers-chunked"
    limits: ClassVar[Mapping[str, Any]] = {**LIMITS, "window": [16], "chunk": [16]}

    def windowed(self, **config: Any) -> "OneLayer":
        taken(config)
        model = Llama4TextConfig(num_hidden_layers=1, attention_chunk_size=config["chunk"], layer_types=["chunked_attention"])
        return Growing(_ours(model), DynamicCache(config=model), create_chunked_causal_mask, config)


class OneLayer:
    def __init__(self, model: Any, cache: Any, mask: Any, config: Mapping[str, Any]) -> None:
        self._model, self._cache, self._mask, self._config = model, cache, mask, config

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    @property
    def stored_tokens(self) -> int:
        return len(self._held())

    def append(self, keys: Any, values: Any) -> None:
        self._update(keys, values)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        of_a_model(query, keys, self._config)
        embeds = torch.zeros(1, keys.shape[0], 1)  # only its shape is used, for the mask
        mask = self._mask(config=self._model, inputs_embeds=embeds, attention_mask=None, past_key_values=self._cache)
        keys, values = self._update(keys, values)
        module = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // self._config["num_kv_heads"])
        out, _ = sdpa_attention_forward(module, _in_batch(query), keys, values, mask, scaling=scale)
        return out[0]

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        held = self._held()
        if any(position not in held for position in positions):
            raise PositionOutOfRange(f"position: expected one of {held}, got {list(positions)}")
        if not held:
            none = torch.zeros(0, self._config["num_kv_heads"], self._config["head_dim"])
            return none, none  # the library has no tensors yet
        layer, at = self._cache.layers[0], [held.index(position) for position in positions]
        return layer.keys[0].transpose(0, 1)[at], layer.values[0].transpose(0, 1)[at]

    def clear(self) -> None:
        self._cache.reset()

    def _held(self) -> range:
        layer = self._cache.layers[0]
        count = min(layer.keys.shape[2], self.length) if layer.is_initialized else 0
        return range(self.length - count, self.length)

    def _update(self, keys: Any, values: Any) -> tuple[Any, Any]:
        try:
            keys, values = self._cache.update(_in_batch(keys), _in_batch(values), 0)
        except (RuntimeError, IndexError, ValueError) as error:
            said = str(error)
            raise (DtypeMismatch if "dtype" in said or "scalar type" in said else ShapeMismatch)(said) from error
        return keys, values


class Growing(OneLayer):
    def truncate(self, length: int) -> None:
        try:
            self._cache.crop(int(length) - self.length)
        except RuntimeError as error:
            raise NotTruncatable(str(error)) from error


class Recorded(Growing):
    def _update(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.length:
            self._cache.crop(0)  # due after each step; delayed as long as part of the step can be truncated
        return super()._update(keys, values)


def _of_a_window(config: dict[str, Any]) -> Any:
    taken(config)
    return _ours(MistralConfig(num_hidden_layers=1, sliding_window=config["window"]))


def _ours(model: Any) -> Any:
    model._attn_implementation = "sdpa"
    return model


def _in_batch(array: Any) -> Any:
    return array.transpose(0, 1)[None]
