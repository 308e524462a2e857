"""Adapter of vLLM's Triton attention for prompts after a cached prefix, `context_attention_fwd`: `vllm-triton-prefill`.

The queries are those of the last tokens, whose keys and values the kernel gets as arrays. The earlier tokens are in a cache in
the layout of that kernel, written by `triton_reshape_and_cache_flash`, with blocks of 16 tokens in descending order; unused slots
contain NaN. The kernel loads 32 tokens at a time, and so reads the table beyond the last block. The table therefore has an even
number of entries, as vLLM's tables have room for the longest sequence.
"""

from typing import Any, ClassVar

import torch

from kvref_adapters._shared.attention import check_matching_shapes
from kvref_adapters.vllm.triton_platform import VllmTriton
from kvref_conformance.exceptions import NotOffered

from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd  # isort: skip - after the platform
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash  # isort: skip

BLOCK = 16  # tokens of a block
PACKED = 4  # numbers of a key that are stored side by side: 16 bytes
ONE = torch.ones(1)  # a scale


class VllmTritonPrefill(VllmTriton):
    name = "vllm-triton-prefill"
    limits: ClassVar[dict[str, Any]] = {
        "dtype": ["float32"], "tokens": {"least": 1}, "head_dim": {"multiple_of": PACKED}, "threads": False,
    }  # fmt: skip

    def attention(self) -> "Prefill":
        return Prefill()


class Prefill:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return _attend(query, keys[:length], values[:length], scale, causal=causal)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks that begin where a query's chunk begins")
        return _attend(query, keys, values, scale, sliding_window=window)

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return _attend(query, keys, values, scale, causal=causal, sinks=logit_sink)


def _attend(query: Any, keys: Any, values: Any, scale: float, **options: Any) -> Any:
    check_matching_shapes(query, keys, values)
    if keys.shape != values.shape:
        raise NotOffered("values whose width differs from that of the keys")
    count, total = len(query), len(keys)
    if count > total:
        raise NotOffered("more queries than tokens: each query is that of a token")
    cached, (heads, dim) = total - count, keys.shape[1:]
    blocks = 2 * max(1, -(-cached // (2 * BLOCK)))
    key_cache = torch.full((blocks, heads, dim // PACKED, BLOCK, PACKED), torch.nan)
    value_cache = torch.full((blocks, heads, dim, BLOCK), torch.nan)
    at = torch.arange(cached)
    slots = (blocks - 1 - at // BLOCK) * BLOCK + at % BLOCK
    before = [tokens[:cached].contiguous() for tokens in (keys, values)]
    triton_reshape_and_cache_flash(*before, key_cache, value_cache, slots, "auto", ONE, ONE)
    new, out = [tokens[cached:] for tokens in (keys, values)], torch.empty(query.shape)
    context_attention_fwd(
        query, *new, out, "auto", key_cache, value_cache, torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None],
        torch.tensor([0, count], dtype=torch.int32), torch.tensor([total], dtype=torch.int32), total, count, ONE, ONE,
        sm_scale=scale, **options,
    )  # fmt: skip
    return out
