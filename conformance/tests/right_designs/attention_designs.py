"""Attention in float16 as kernels for tensor cores compute it."""

import numpy as np

from .simple_paged import POSITION, SHAPE, require_range

DTYPE = type("DtypeMismatch", (Exception,), {})


class RoundedWeights:
    """Scores and sums are float32; the weights are rounded to float16 before they are multiplied by the values."""

    def attention(self, query, keys, values, scale, causal, length):
        if any(array.dtype != np.float16 for array in (query, keys, values)):
            raise DTYPE("expected float16")
        fits = query.ndim == keys.ndim == values.ndim == 3 and query.shape[2] == keys.shape[2] > 0 < values.shape[2]
        if not fits or keys.shape[:2] != values.shape[:2] or not query.shape[1] or query.shape[1] % keys.shape[1]:
            raise SHAPE(f"{query.shape}, {keys.shape}, {values.shape}")
        require_range(POSITION, length, len(keys) + 1)
        keys, values = (
            np.repeat(part[:length], query.shape[1] // keys.shape[1], 1).astype(np.float32) for part in (keys, values)
        )
        output = np.zeros((*query.shape[:2], values.shape[2]), np.float16)
        for row, each in enumerate(query.astype(np.float32)):
            count = length - len(query) + 1 + row if causal else length
            if count > 0:
                output[row] = self.row(each, keys[:count], values[:count], np.float32(scale))
        return output

    @np.errstate(all="ignore")
    def row(self, query, keys, values, scale):
        scores = np.einsum("hd,nhd->hn", query, keys) * scale
        weights = np.exp(scores - scores.max(1, keepdims=True))
        sums = weights.sum(1, keepdims=True)
        return np.einsum("hn,nhd->hd", self.rounded(weights), values) / sums

    def rounded(self, weights):
        return weights.astype(np.float16).astype(np.float32)


LIMITS = {"RoundedWeights": {"dtype": "float16", "rounded_weights": True}}
DESIGNS = (RoundedWeights,)
