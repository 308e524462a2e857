"""Adapters of vLLM's Triton attention for decoding and of its merge: `vllm-triton-decode` and `vllm-triton-merge`.

`vllm-triton-decode` is `decode_attention_fwd` with four splits, over pages of 16 tokens in descending order; the last page is
filled up with NaN. Each query is a request of its own with the number of tokens that it sees, as vLLM decodes several tokens of
a request at once.

`vllm-triton-merge` runs that kernel over some tokens that every query sees and over the others, and combines both results and
their log-sum-exps with `merge_attn_states`. Both parts have tokens, as in vLLM; if there are too few, it does not merge.
"""

from typing import Any, ClassVar

import torch

from kvref_adapters._shared.attention import check_matching_shapes
from kvref_adapters.vllm.triton_platform import VllmTriton, blocks_of
from kvref_conformance.exceptions import NotOffered

from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd  # isort: skip - after the platform
from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states  # isort: skip

PAGE = 16  # tokens
SPLITS = 4


class VllmTritonDecode(VllmTriton):
    name = "vllm-triton-decode"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "threads": False}

    def attention(self) -> "Decoding":
        return Decoding()


class VllmTritonMerge(VllmTritonDecode):
    name = "vllm-triton-merge"

    def attention(self) -> "Merging":
        return Merging()


class Decoding:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        keys, values = keys[:length], values[:length]
        check_matching_shapes(query, keys, values)
        seen = torch.full((len(query),), len(keys), dtype=torch.int32)
        if causal:
            if len(query) > len(keys):
                raise NotOffered("more queries than tokens: each query is that of a token")
            seen += torch.arange(1 - len(query), 1, dtype=torch.int32)
        return self._attend(query, keys, values, scale, seen)

    def _attend(self, query: Any, keys: Any, values: Any, scale: float, seen: Any) -> Any:
        return _decode(query, keys, values, scale, seen)[0]


class Merging(Decoding):
    def _attend(self, query: Any, keys: Any, values: Any, scale: float, seen: Any) -> Any:
        least = int(seen.min()) if len(seen) else 0  # number of tokens that every query sees
        if least < 2:
            return super()._attend(query, keys, values, scale, seen)
        half = least // 2
        first = _decode(query, keys[:half], values[:half], scale, torch.full_like(seen, half))
        second = _decode(query, keys[half:], values[half:], scale, seen - half)
        out = torch.empty_like(first[0])
        merge_attn_states(out, first[0], first[1].T, second[0], second[1].T)
        return out


def _decode(query: Any, keys: Any, values: Any, scale: float, seen: Any) -> tuple[Any, Any]:
    """Return the output [queries, heads, width] and its log-sum-exps [queries, heads]. seen: the number of tokens per query."""
    count, pages = len(query), -(-len(keys) // PAGE)
    blocks = [blocks_of(tokens, PAGE, torch.nan).flip(0).contiguous() for tokens in (keys, values)]
    out, sums = torch.empty(*query.shape[:2], values.shape[-1]), torch.empty(query.shape[:2])
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).repeat(count, 1)
    decode_attention_fwd(
        query.contiguous(), *blocks, out, sums, table, seen,
        torch.empty(*query.shape[:2], SPLITS, values.shape[-1] + 1), SPLITS, scale, PAGE,
    )  # fmt: skip
    return out, sums
