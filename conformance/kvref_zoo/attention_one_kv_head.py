"""The index of the kv head is computed with a wrong divisor: every query head reads the first kv head."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, **options: Any) -> Any:
        return kvref.attention(query, keys[:, :1], values[:, :1], **options)


class Implementation(Right):
    clause = "ATTN-01"
    also = ("ATTN-02", "ATTN-04", "ATTN-05", "ATTN-07", "ATTN-09", "LAW-10")
    bug = "PSAL-POSTECH/ONNXim#34"

    def attention(self) -> "Attention":
        return Attention()
