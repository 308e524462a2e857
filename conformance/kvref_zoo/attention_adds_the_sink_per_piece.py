"""Attention is computed in tiles, and each tile adds the logit sink to its sum: it is counted once per tile instead of once."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right

PIECE = 64


class Attention:
    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        pieces = max(1, -(-len(keys) // PIECE))
        often = np.asarray(logit_sink) + np.float32(np.log(pieces))
        return kvref.attention(query, keys, values, scale=scale, causal=causal, logit_sink=often)


class Implementation(Right):
    clause = "WIN-08"

    def attention(self) -> Attention:
        return Attention()
