"""Adapter of a sliding window layer in Hugging Face transformers' PagedAttentionCache (continuous batching).

A window is a ring of blocks there: `SlidingAttentionCacheAllocator`. One step does what a batch of one request does, by the
library's own calls and in their order: allocation (`can_store_request_tokens`), indices (`extend_read_and_write_indices`), the
mask (`build_attention_mask`), and `sdpa_attention_forward`, which updates the cache and attends. Stored tokens are those that the
next step would read. The caller, here the adapter, counts the tokens of a request.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers import ContinuousBatchingConfig, MistralConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvref.errors import DtypeMismatch, OutOfBlocks, PositionOutOfRange, ShapeMismatch
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, taken
from kvref_conformance.interface import Level

KIND = "sliding_attention"
PAGE = 4  # tokens: the minimum of its initialization


class PagedWindow:
    name = "transformers-paged-window"
    version = transformers.__version__
    language = "python"
    project = "transformers"
    level: Level = "exact"
    formats = ("float32",)  # keys and values must have the cache's dtype: it does not cast
    # the model's limit: rotary embedding rotates pairs
    limits: ClassVar[Mapping[str, Any]] = {**LIMITS, "head_dim": {"multiple_of": 2}}

    def windowed(self, **config: Any) -> "OneLayer":
        return OneLayer(config)

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class OneLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        taken(config)
        heads, dim, window = config["num_kv_heads"], config["head_dim"], config["window"]
        model = MistralConfig(
            num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads * dim, head_dim=dim,
            sliding_window=window, vocab_size=8,
        )  # fmt: skip
        batches = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=-(-window // PAGE), max_batch_tokens=1, max_memory_percent=0.9, max_blocks_per_request=0
        )
        self._config = config
        self._cache = PagedAttentionCache(model, batches, "cpu", DistributedHelper(None, None), torch.float32)
        self.clear()

    def clear(self) -> None:
        self._cache.reset()
        self._request, self.length = RequestState("request", []), 0
        self._cache.can_store_request_tokens(self._request, 0)

    @property
    def stored_tokens(self) -> int:
        return len(self._held())

    def append(self, keys: Any, values: Any) -> None:
        self._said(lambda told: self._cache.update(_in_batch(keys), _in_batch(values), 0, told), len(keys))

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        of_a_model(query, keys, self._config)
        count, window = len(keys), self._config["window"]
        total = self._cache.cache_allocators[KIND].get_seqlen_k(self.length, count)
        mask = torch.empty(1, 1, count, total)
        build_attention_mask(mask, [0, count], [0, total], window)
        layer = SimpleNamespace(layer_idx=0, is_causal=False, num_key_value_groups=query.shape[1] // keys.shape[1])

        def forward(told: dict[str, Any]) -> Any:
            given = [_in_batch(array) for array in (query, keys, values)]
            return sdpa_attention_forward(layer, *given, mask, scaling=scale, cache=self._cache, **told)

        return self._said(forward, count)[0][0]

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        held = self._held()
        if any(position not in held for position in positions):
            raise PositionOutOfRange(f"position: expected one of {held}, got {list(positions)}")
        none = _in_batch(torch.zeros(0, self._config["num_kv_heads"], self._config["head_dim"]))
        keys, values = self._cache.update(none, none, 0, self._told(0))
        at = [held.index(position) for position in positions]
        return keys[0].transpose(0, 1)[at], values[0].transpose(0, 1)[at]

    def _held(self) -> range:
        return range(self.length - self._cache.cache_allocators[KIND].get_seqlen_k(self.length, 0), self.length)

    def _said(self, forward: Any, count: int) -> Any:
        """Return the attention output of a forward pass of `count` tokens, after their blocks were allocated."""
        self._request.position_offset = self.length
        if not self._cache.can_store_request_tokens(self._request, count):
            raise OutOfBlocks(f"can_store_request_tokens: no room for {count} tokens after {self.length}")
        try:
            found = forward(self._told(count))
        except (RuntimeError, IndexError, ValueError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        self.length += count
        return found

    def _told(self, count: int) -> dict[str, Any]:
        """Return what a layer receives about its batch. If no request has tokens yet, nothing is read."""
        read, wrote = [list[int]()], [list[int]()]
        name, past = self._request.request_id, self.length
        self._cache.extend_read_and_write_indices(name, past, count, read if past else None, wrote)
        total = self._cache.cache_allocators[KIND].get_seqlen_k(past, count)
        return {
            "cu_seq_lens_k": {KIND: torch.tensor([0, total])},
            "max_length_k": {KIND: total},
            "read_index": [torch.tensor(index, dtype=torch.int64) for index in read],
            "write_index": [torch.tensor(index, dtype=torch.int64) for index in wrote],
        }


def _in_batch(array: Any) -> Any:
    return array.transpose(0, 1)[None]
