"""Adapters of FlashAttention's CUDA kernels: `flash-attn` and `flash-attn-paged`. Not run yet: see docs/on-a-gpu.md.

- `flash-attn`: `flash_attn_func`, whose causal mask ends at the last token.
- `flash-attn-paged`: `flash_attn_with_kvcache` over one sequence in pages of 256 tokens. The block table has the pages in
  descending order, and the pages contain the tokens after the last one that the queries see.
"""

from typing import Any, ClassVar

import torch
from flash_attn import __version__ as version
from flash_attn import flash_attn_func, flash_attn_with_kvcache

from kvref_adapters._shared.attention import check_equal_shapes, check_paired_queries
from kvref_adapters._shared.cuda_arrays import CudaArrays, pages_in_descending_order
from kvref_conformance.exceptions import NotOffered

PAGE = 256  # tokens of a page: its smallest size


class FlashAttn(CudaArrays):
    name = "flash-attn"
    version: ClassVar[str] = version
    project = "flash-attn"

    def attention(self) -> "Attention":
        return Attention()


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        check_equal_shapes(query, keys, values)
        check_paired_queries(query, length)
        found = flash_attn_func(query[None], keys[None, :length], values[None, :length], softmax_scale=scale, causal=causal)
        return found[0]

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        check_equal_shapes(query, keys, values)
        check_paired_queries(query, len(keys))
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        seen = (window - 1, 0)
        return flash_attn_func(query[None], keys[None], values[None], softmax_scale=scale, causal=True, window_size=seen)[0]


class FlashAttnPaged(FlashAttn):
    name = "flash-attn-paged"

    def attention(self) -> "PagedAttention":
        return PagedAttention()


class PagedAttention(Attention):
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(query, keys, values, scale, causal, length, (-1, -1))

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        return self._attend(query, keys, values, scale, True, len(keys), (window - 1, 0))

    def _attend(
        self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int, window: tuple[int, int]
    ) -> Any:
        check_equal_shapes(query, keys, values)
        check_paired_queries(query, length)
        pages = [pages_in_descending_order(each, PAGE) for each in (keys, values)]
        table = torch.arange(len(pages[0]) - 1, -1, -1, dtype=torch.int32, device=query.device)[None]
        lengths = torch.tensor([length], dtype=torch.int32, device=query.device)
        found = flash_attn_with_kvcache(
            query[None], *pages, cache_seqlens=lengths, block_table=table, softmax_scale=scale, causal=causal, window_size=window
        )
        return found[0]
