"""Adapters of vLLM's Triton attention in Triton's interpreter, which runs it on a CPU: `vllm-triton-attention` and `-segments`.

The kernel is `unified_attention`, over one sequence in a paged cache with blocks of 16 tokens. The last block is filled up with
NaN, and the table has the blocks in descending order. The kernel loads 32 tokens at a time, and so reads the table beyond the
last block. The table therefore has an even number of entries, as vLLM's tables have room for the longest sequence. vLLM gives it
no queries before the first token, so they are *not offered*.
"""

from typing import Any, ClassVar

import torch

from kvref_adapters.vllm.triton_platform import VllmTriton, blocks_of
from kvref_conformance.exceptions import NotOffered

from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # isort: skip - after the platform

BLOCK = 16  # tokens of a block
SEGMENTS = 4  # parts of a sequence whose results are merged, of the kernel with segments
ALL = (-1, -1)  # a window that hides nothing


class VllmTritonAttention(VllmTriton):
    """One program per head and group of queries reads all tokens."""

    name = "vllm-triton-attention"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "tokens": {"least": 1}, "threads": False}
    segments: ClassVar[bool] = False

    def attention(self) -> "AttentionCalls":
        return AttentionCalls(self.segments)


class VllmTritonSegments(VllmTritonAttention):
    """Four programs per head and sequence read a part of the tokens each, and a second kernel merges them.

    vLLM does that for a single query or at most 8 causal ones. All other calls run the kernel without segments here too.
    """

    name = "vllm-triton-segments"
    segments = True


class AttentionCalls:
    def __init__(self, segments: bool) -> None:
        self._segments = segments

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(query, keys[:length], values[:length], scale, causal)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks that begin where a query's chunk begins")
        return self._attend(query, keys, values, scale, True, (window - 1, 0))

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attend(query, keys, values, scale, causal, logit_sink=logit_sink)

    def _attend(
        self, query: Any, keys: Any, values: Any, scale: float, causal: bool, window: tuple[int, int] = ALL,
        logit_sink: Any = None,
    ) -> Any:  # fmt: skip
        if keys.shape != values.shape:
            raise NotOffered("values whose shape differs from that of the keys")
        if causal and len(query) > len(keys):
            raise NotOffered("queries before the first token")
        count, blocks = len(keys), -(-len(keys) // BLOCK)
        pages = [blocks_of(tokens, BLOCK, torch.nan).flip(0).contiguous() for tokens in (keys, values)]
        out, merged = torch.empty(query.shape), dict[str, Any]()
        if self._segments:
            rows, width = (len(query), query.shape[1], SEGMENTS), 1 << (query.shape[2] - 1).bit_length()
            merged = {
                "seq_threshold_3D": 8, "num_par_softmax_segments": SEGMENTS, "softmax_segm_output": torch.empty(*rows, width),
                "softmax_segm_max": torch.empty(rows), "softmax_segm_expsum": torch.empty(rows),
            }  # fmt: skip
        unified_attention(
            query.contiguous(), *pages, out, torch.tensor([0, len(query)], dtype=torch.int32), len(query),
            torch.tensor([count], dtype=torch.int32), count, scale, causal, window,
            torch.tensor([[*range(blocks - 1, -1, -1), *[0] * (blocks % 2)]], dtype=torch.int32), 0.0,
            None, None, None, sinks=logit_sink, **merged,
        )  # fmt: skip
        return out
