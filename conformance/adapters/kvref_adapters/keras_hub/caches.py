"""Adapter of KerasHub's CachedMultiHeadAttention, which writes a layer's new keys and values into a cache, as a contiguous cache.

The cache is an array of the caller's, of its final size from the start; the caller passes the index of the new tokens and counts
them, as KerasHub's models do. The returned array, a new one in each call, is what is judged, so there are no raw buffers. The
layer's projections run, so that their input checks and output dtypes count, but their results are replaced by the given tokens.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

from kvref.errors import CapacityExceeded, ConfigError, ShapeMismatch
from kvref_adapters._shared.attention import join_heads
from kvref_adapters.keras.adapter import import_keras
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

LONGEST = 2048  # tokens; the buffers have their final size from the start


class KerasHubCaches:
    version = f"{version('keras-hub')}, keras {version('keras')}"
    language = "python"
    project = "keras-hub"
    level: Level = "exact"
    formats = ("float32", "float16", "bfloat16")
    limits: ClassVar[Mapping[str, Any]] = {
        "tokens": {"least": 1}, "contiguous": {"initial_capacity": {"least": LONGEST}, "max_seq_len": {"most": LONGEST}},
    }  # fmt: skip
    backend = ""

    def __init__(self) -> None:
        self._keras = import_keras(self.backend)
        self._layer = import_module("keras_hub").layers.CachedMultiHeadAttention

    def asarray(self, values: Any) -> Any:
        return self._keras.ops.convert_to_tensor(values.copy())

    def to_numpy(self, array: Any) -> Any:
        wide = "float32" if self._keras.backend.standardize_dtype(array.dtype) == "bfloat16" else array.dtype
        return self._keras.ops.convert_to_numpy(self._keras.ops.cast(array, wide))

    def contiguous(self, **config: Any) -> "KerasHubLayer":
        return KerasHubLayer(self._keras.ops, self._layer, **config)


class KerasHubLayer:
    def __init__(
        self, ops: Any, made: Any, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int,
        dtype: str,
    ) -> None:  # fmt: skip
        if type(initial_capacity) is not int or initial_capacity < LONGEST:
            raise NotOffered("an initial_capacity argument")
        if not all(type(size) is int and size > 0 for size in (batch_size, max_seq_len)):
            raise NotOffered("validation of batch_size and max_seq_len: the caller creates the array")
        if dtype is None:
            raise NotOffered("a cache without a dtype: Keras uses its default")
        self._ops, self._heads, self.seq_len, self.capacity = ops, (num_kv_heads, head_dim), 0, max_seq_len
        try:
            self._layer = made(num_kv_heads, head_dim, dtype=dtype, use_bias=False)
            flat = (batch_size, None, num_kv_heads * head_dim)
            self._layer.build(flat, flat)
            self._cache = ops.zeros((batch_size, 2, max_seq_len, num_kv_heads, head_dim), dtype)
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        for name in ("_query_dense", "_key_dense", "_value_dense"):
            object.__setattr__(self._layer, name, self._through(getattr(self._layer, name)))

    def append(self, keys: Any, values: Any) -> None:
        flat = [join_heads(part, *self._heads, self._ops) for part in (keys, values)]
        try:
            _, cache = self._layer(flat[0], flat[1], flat[0], cache=self._cache, cache_update_index=self.seq_len)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            # the library's message is the same for both errors
            full = keys.ndim == 4 and self.seq_len + keys.shape[2] > self.capacity
            raise (CapacityExceeded if full else ShapeMismatch)(str(error)) from error
        self._cache, self.seq_len = cache, self.seq_len + keys.shape[2]

    def read(self) -> tuple[Any, Any]:
        keys, values = (self._ops.swapaxes(self._cache[:, part], 1, 2) for part in (0, 1))
        return keys[:, :, : self.seq_len], values[:, :, : self.seq_len]

    def _through(self, projection: Any) -> Any:
        """Return the given tokens in the shape and dtype of the projection's output."""

        def as_it_came(given: Any) -> Any:
            projected = projection(given)
            return self._ops.reshape(self._ops.cast(given, projected.dtype), projected.shape)

        return as_it_came


class KerasHubCachedOnJax(KerasHubCaches):
    name, backend = "keras-hub-cached-jax", "jax"


class KerasHubCachedOnTorch(KerasHubCaches):
    name, backend = "keras-hub-cached-torch", "torch"
