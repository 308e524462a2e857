"""What attention gives, and how far float32 may lie from it. The witness adds the rounding to a narrower dtype."""

from typing import Any

import numpy as np

from kvref_conformance.oracle.attention import U, attention
from kvref_conformance.oracle.expected import (
    Arrays,
    Expected,
    Unjudged,
    finite,
    float32,
)  # fmt: skip
from kvref_conformance.oracle.model import Function
from kvref_conformance.oracle.rows import Reads


class Attention(Function):
    family = "attention"

    def attention(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int) -> Expected:
        query, keys, values = (float32(part) for part in (query, keys, values))
        if query.ndim != 3 or keys.ndim != 3 or query.shape[1] % keys.shape[1] or length > len(keys):
            raise ValueError("shapes that do not fit")
        keys, values = keys[:length], values[:length]
        reach = [float(np.abs(part).max(initial=0)) for part in (query, keys)]
        if not finite(query, keys, values) or reach[0] * reach[1] * query.shape[2] * max(1.0, abs(scale)) > 1e38:
            return Unjudged("ATTN-04")  # float32 scores overflow on the way
        out, bound = attention(query, keys, values, scale=scale, causal=causal)
        return Arrays("ATTN-04", parts=(Reads(out.astype(np.float32), bound + U * np.abs(out)),), always_slack=True)
