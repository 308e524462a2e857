"""The softmax computes exp of the scores without first subtracting the largest score, and large scores overflow."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        out = kvref.attention(query, keys, values, scale=scale, causal=causal, length=length)
        largest = np.abs(query).max(initial=0) * np.abs(keys[:length]).max(initial=0) * scale * query.shape[2]
        return out * np.float32(np.nan) if largest > 88 else out


class Implementation(Right):
    clause = "ATTN-03"
    also = ("ATTN-02", "ATTN-04", "ATTN-05", "ATTN-06")

    def attention(self) -> "Attention":
        return Attention()
