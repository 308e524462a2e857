"""Attention with the limits of a GPU kernel: float16 arrays, heads of 64 or 128."""

from typing import Any, ClassVar

import numpy as np

from api_subsets import Host
from api_subsets.errors import PositionOutOfRange, ShapeMismatch
from api_subsets.given import index, tokens

WIDTHS = (64, 128)


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        """float16 [queries, query heads, value_dim], rounded once from float32."""
        for array in (query, keys, values):
            tokens((array,), (None, None, None), (np.float16,))
        heads, width = keys.shape[1:]
        if width not in WIDTHS or values.shape[2] not in WIDTHS:
            raise ShapeMismatch(f"expected heads of 64 or 128, got {width} and {values.shape[2]}")
        if heads == 0 or query.shape[1] % heads or query.shape[2] != width or values.shape[:2] != keys.shape[:2]:
            raise ShapeMismatch(f"query {query.shape}, keys {keys.shape}, values {values.shape}")
        length = index(length, len(keys) + 1, PositionOutOfRange)
        with np.errstate(over="ignore"):
            return self.attend(query, keys, values, scale, causal, length).astype(np.float16)

    def attend(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int) -> Any:
        output = np.zeros((*query.shape[:2], values.shape[2]), np.float32)
        for row, head in np.ndindex(*query.shape[:2]):
            seen = self.seen(row, len(query), causal, length)
            group = self.group(head, query.shape[1], keys.shape[1])
            if seen > 0:
                output[row, head] = self.one(query[row, head], keys[:seen, group], values[:seen, group], scale)
        return output

    def seen(self, row: int, queries: int, causal: bool, length: int) -> int:
        """The number of tokens that a query sees: with `causal` the queries are the last tokens."""
        return length - queries + 1 + row if causal else length

    def group(self, head: int, query_heads: int, kv_heads: int) -> int:
        return head // (query_heads // kv_heads)

    def one(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        """Attention of one query head over the tokens that it sees."""
        with np.errstate(over="ignore", invalid="ignore"):
            scores = keys.astype(np.float32) @ query.astype(np.float32) * np.float32(scale)
            weights = np.exp(scores - scores.max())
            return weights @ values.astype(np.float32) / weights.sum()


class KernelAttention(Host):
    name = "attention kernel"
    formats = ("float16",)
    limits: ClassVar = {"dtype": ["float16"], "head_dim": list(WIDTHS)}
    attention = Attention
