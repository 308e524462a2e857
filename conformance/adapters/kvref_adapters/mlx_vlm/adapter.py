"""Adapters of mlx-vlm's caches for batches of prompts with different lengths, as its BatchGenerator uses them.

See kvref_adapters/_shared/mlx_batches.py. The adapters validate nothing.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.cache import BatchKVCache, BatchRotatingKVCache

from kvref_adapters._shared.mlx_batches import MlxBatchLayer
from kvref_adapters.mlx.adapter import Mlx
from kvref_conformance.implementation_api import Level


class MlxVlmRagged(Mlx):
    version = version("mlx-vlm")
    language = "python"
    project = "mlx-vlm"
    level: Level = "exact"
    formats = ("float32",)  # a cache takes the dtype of the first tokens
    name = "mlx-vlm-batch"
    limits: ClassVar[Mapping[str, Any]] = {"tokens": {"least": 1}}  # a model is never called without tokens

    def ragged(self, **config: Any) -> MlxBatchLayer:
        return MlxBatchLayer(lambda rows: BatchKVCache([0] * rows), scaled_dot_product_attention, config)


class MlxVlmRaggedRotating(MlxVlmRagged):
    """With a window of the maximum length, so that no token of a row leaves it."""

    name = "mlx-vlm-batch-rotating"

    def ragged(self, **config: Any) -> MlxBatchLayer:
        size = config["max_tokens"]
        return MlxBatchLayer(lambda rows: BatchRotatingKVCache(size, [0] * rows), scaled_dot_product_attention, config)
