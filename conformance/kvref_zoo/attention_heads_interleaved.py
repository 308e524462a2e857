"""With H kv heads, query head h reads kv head h % H instead of h // group: right for MHA, wrong for GQA."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, **options: Any) -> Any:
        heads = [np.arange(query.shape[1]) % part.shape[1] for part in (keys, values)]
        return kvref.attention(query, keys[:, heads[0]], values[:, heads[1]], **options)


class Implementation(Right):
    clause = "ATTN-01"
    also = ("ATTN-02", "ATTN-04", "ATTN-05", "ATTN-07", "ATTN-09", "LAW-10")
    bug = "apple/axlearn#842"

    def attention(self) -> "Attention":
        return Attention()
