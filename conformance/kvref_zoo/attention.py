"""Wrong attention."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant

TILE = 64


@mutant("WIN-08")
class AttentionAddsTheSinkPerTile:
    """Attention is computed in tiles, and each tile adds the logit sink to its sum.

    It is counted once per tile instead of once.
    """

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        tiles = max(1, -(-len(keys) // TILE))
        often = np.asarray(logit_sink) + np.float32(np.log(tiles))
        return kvref.attention(query, keys, values, scale=scale, causal=causal, logit_sink=often)


@mutant("ATTN-01", also="ATTN-02 ATTN-04 ATTN-05 ATTN-07 ATTN-08 ATTN-09 LAW-10", seen_in="apple/axlearn#842")
class AttentionHeadsInterleaved:
    """With H kv heads, query head h reads kv head h % H instead of h // group: right for MHA, wrong for GQA."""

    def attention(self, query: Any, keys: Any, values: Any, **options: Any) -> Any:
        heads = [np.arange(query.shape[1]) % part.shape[1] for part in (keys, values)]
        return kvref.attention(query, keys[:, heads[0]], values[:, heads[1]], **options)


@mutant("ATTN-07", seen_in="Dao-AILab/flash-attention#1745")
class AttentionNanPastTheEnd:
    """Values past the length are multiplied by a weight of 0 instead of being left out: 0 * NaN is NaN."""

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        out = kvref.attention(query, keys, values, scale=scale, causal=causal, length=length)
        return out + np.float32(0) * values[length:].sum()


@mutant("ATTN-01", also="ATTN-02 ATTN-04 ATTN-05 ATTN-07 ATTN-08 ATTN-09 LAW-10", seen_in="PSAL-POSTECH/ONNXim#34")
class AttentionOneKvHead:
    """The index of the kv head is computed with a wrong divisor: every query head reads the first kv head."""

    def attention(self, query: Any, keys: Any, values: Any, **options: Any) -> Any:
        return kvref.attention(query, keys[:, :1], values[:, :1], **options)


@mutant("ATTN-03", also="ATTN-02 ATTN-04 ATTN-05 ATTN-06 ATTN-07")
class AttentionOverflows:
    """The softmax computes exp of the scores without first subtracting the largest score, and large scores overflow."""

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        out = kvref.attention(query, keys, values, scale=scale, causal=causal, length=length)
        largest = np.abs(query).max(initial=0) * np.abs(keys[:length]).max(initial=0) * scale * query.shape[2]
        return out * np.float32(np.nan) if largest > 88 else out
