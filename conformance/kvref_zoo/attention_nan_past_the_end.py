"""Values past the length are multiplied by a weight of 0 instead of being left out: 0 * NaN is NaN."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        out = kvref.attention(query, keys, values, scale=scale, causal=causal, length=length)
        return out + np.float32(0) * values[length:].sum()


class Implementation(Right):
    clause = "ATTN-07"
    bug = "Dao-AILab/flash-attention#1745"

    def attention(self) -> "Attention":
        return Attention()
