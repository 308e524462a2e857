"""Adapters of mlx-lm's caches for batches of prompts with different lengths, as its BatchGenerator uses them.

See kvref_adapters/_shared/mlx_batches.py. The adapters validate nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from kvref_adapters._shared.mlx_batches import MlxBatchLayer
from kvref_adapters.mlx_lm.caches import MlxLm


class MlxLmRagged(MlxLm):
    name = "mlx-lm-batch"
    limits: ClassVar[Mapping[str, Any]] = {"tokens": {"least": 1}}  # a model is never called without tokens

    def ragged(self, **config: Any) -> MlxBatchLayer:
        return MlxBatchLayer(lambda rows: BatchKVCache([0] * rows), scaled_dot_product_attention, config)


class MlxLmRaggedRotating(MlxLmRagged):
    """With a window of the maximum length, so that no token of a row leaves it."""

    name = "mlx-lm-batch-rotating"

    def ragged(self, **config: Any) -> MlxBatchLayer:
        size = config["max_tokens"]
        return MlxBatchLayer(lambda rows: BatchRotatingKVCache(size, [0] * rows), scaled_dot_product_attention, config)
