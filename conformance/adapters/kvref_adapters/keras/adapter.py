"""Adapter of keras.ops.dot_product_attention on Keras' backends NumPy and PyTorch, on a CPU.

Keras' JAX backend calls JAX's own function. The causal mask counts from the first token, so queries of the last tokens are padded
with zero rows in front. It has no length argument: tokens past the length are masked, as Keras' own layers do it.
"""

import os
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvref.errors import ShapeMismatch
from kvref_adapters._shared.attention import check_value_width, padding_rows
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementation_api import Level


def import_keras(backend: str) -> Any:
    """Import Keras on a backend. Raises CannotRun if it is already imported on another."""
    os.environ["KERAS_BACKEND"] = backend  # set before Keras is imported
    keras = import_module("keras")
    if keras.backend.backend() != backend:
        raise CannotRun(f"Keras already uses the backend {keras.backend.backend()}")
    return keras


class KerasAttention:
    version = version("keras")
    language = "python"
    project = "keras"
    level: Level = "exact"
    formats = ("float32",)
    backend = ""

    def __init__(self) -> None:
        self._ops = import_keras(self.backend).ops

    def asarray(self, values: Any) -> Any:
        return self._ops.convert_to_tensor(values.copy())

    def to_numpy(self, array: Any) -> Any:
        return self._ops.convert_to_numpy(array)

    def attention(self) -> "KerasDotProduct":
        return KerasDotProduct(self._ops)


class KerasDotProduct:
    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        check_value_width(query, keys, values)
        before = padding_rows(query, length) if causal else 0
        if before:
            query = self._ops.concatenate([self._ops.zeros((before, *query.shape[1:]), dtype="float32"), query])
        mask = self._ops.arange(len(keys))[None, None, None] < int(length) if length < len(keys) else None
        given = [part[None] for part in (query, keys, values)]
        try:
            out = self._ops.dot_product_attention(*given, mask=mask, scale=scale, is_causal=causal)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ShapeMismatch(str(error)) from error
        return out[0, before:]


class KerasAttentionOnNumpy(KerasAttention):
    name, backend = "keras-attention-numpy", "numpy"


class KerasAttentionOnTorch(KerasAttention):
    name, backend = "keras-attention-torch", "torch"
