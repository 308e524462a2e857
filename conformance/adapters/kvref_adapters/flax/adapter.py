"""Adapters of Flax's attention layers in decode mode as contiguous caches: nnx.MultiHeadAttention and its predecessor in linen.

`append` calls the layer with `decode=True`, one token per call, as the layer requires. The layer's projections run, so that their
input checks and output dtypes count, but their results are replaced by the given tokens; keys and values reach the cache
unchanged. `read` returns what the layer's mask exposes: the first `cache_index` tokens. Buffers have their final size from the
start, and tokens cannot be removed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.errors import ScopeParamShapeError

from kvref.errors import ConfigError, DtypeMismatch, ShapeMismatch
from kvref_adapters._shared.attention import join_heads
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

LONGEST = 2048  # tokens; the buffers have their final size from the start


class FlaxCaches(ABC):
    version = f"{flax.__version__}, jax {jax.__version__}"
    language = "python"
    project = "flax"
    level: Level = "exact"
    formats = ("float32", "float16", "bfloat16")
    limits: ClassVar[Mapping[str, Any]] = {
        "tokens": [1], "contiguous": {"initial_capacity": {"least": LONGEST}, "max_seq_len": {"most": LONGEST}},
    }  # fmt: skip

    def __init__(self) -> None:
        jax.config.update("jax_enable_x64", True)  # otherwise JAX converts float64 to float32 before the cache can reject it

    def asarray(self, values: Any) -> Any:
        return jnp.array(values)

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)

    @abstractmethod
    def contiguous(self, **config: Any) -> "FlaxLayer": ...


class FlaxLayer(ABC):
    def __init__(self, initial_capacity: int, num_kv_heads: int, head_dim: int, **sizes: Any) -> None:
        if type(initial_capacity) is not int or initial_capacity < LONGEST:
            raise NotOffered("an initial_capacity argument")
        self._heads = num_kv_heads, head_dim
        try:
            self._make(heads=num_kv_heads, dim=head_dim, **sizes)
        except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error

    @abstractmethod
    def _make(self, batch_size: int, heads: int, dim: int, max_seq_len: int, dtype: str) -> None: ...

    @abstractmethod
    def _call(self, keys: Any, values: Any) -> None:
        """Decode one token, with its key as the query."""

    @abstractmethod
    def _held(self) -> tuple[Any, Any, Any]:
        """Return keys and values [batch, length, heads, dim], and the cache index."""

    @property
    def seq_len(self) -> int:
        return int(self._held()[2])

    @property
    def capacity(self) -> int:
        return int(self._held()[0].shape[1])

    def append(self, keys: Any, values: Any) -> None:
        flat = [join_heads(part, *self._heads, jnp) for part in (keys, values)]
        try:
            self._call(*flat)
        except (ScopeParamShapeError, ArithmeticError, AssertionError, IndexError, TypeError, ValueError) as error:
            raise (DtypeMismatch if "dtypes" in str(error) else ShapeMismatch)(str(error)) from error

    def raw(self) -> tuple[Any, Any]:
        keys, values, _ = self._held()
        return keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def read(self) -> tuple[Any, Any]:
        keys, values = self.raw()
        return keys[:, :, : self.seq_len], values[:, :, : self.seq_len]


def _as_it_came(projected: Any, given: Any) -> Any:
    """Return the given tokens in the shape and dtype of the projection's output."""
    return given.astype(projected.dtype).reshape(projected.shape)


class FlaxNnx(FlaxCaches):
    name = "flax-nnx"

    def contiguous(self, **config: Any) -> "FlaxNnxLayer":
        return FlaxNnxLayer(**config)


class FlaxNnxLayer(FlaxLayer):
    def _make(self, batch_size: int, heads: int, dim: int, max_seq_len: int, dtype: str) -> None:
        computed = None if dtype == "float32" else dtype  # None, the default, is float32, or a wider dtype if the input has one
        layer = nnx.MultiHeadAttention(heads, heads * dim, decode=True, dtype=computed, use_bias=False, rngs=nnx.Rngs(0))
        for name in ("query", "key", "value"):
            setattr(layer, name, IdentityProjection(getattr(layer, name)))
        self._layer, self._shape, self._dtype = layer, (batch_size, max_seq_len, heads * dim), dtype
        self.reset()

    def reset(self) -> None:
        self._layer.init_cache(self._shape, self._dtype)

    def _call(self, keys: Any, values: Any) -> None:
        self._layer(keys, keys, values)

    def _held(self) -> tuple[Any, Any, Any]:
        return self._layer.cached_key[...], self._layer.cached_value[...], self._layer.cache_index[...]


class IdentityProjection(nnx.Module):  # type: ignore[misc]
    def __init__(self, projection: Any) -> None:
        self.projection = projection

    def __call__(self, given: Any, out_sharding: Any = None) -> Any:
        return _as_it_came(self.projection(given, out_sharding=out_sharding), given)


class FlaxLinen(FlaxCaches):
    name = "flax-linen"

    def contiguous(self, **config: Any) -> "FlaxLinenLayer":
        return FlaxLinenLayer(**config)


class FlaxLinenLayer(FlaxLayer):
    def _make(self, batch_size: int, heads: int, dim: int, max_seq_len: int, dtype: str) -> None:
        computed = None if dtype == "float32" else dtype
        self._layer = linen.MultiHeadDotProductAttention(heads, decode=True, dtype=computed, use_bias=False)
        all_of_them = jnp.zeros((batch_size, max_seq_len, heads * dim), dtype)
        self._variables = self._layer.init(jax.random.key(0), all_of_them)

    def _call(self, keys: Any, values: Any) -> None:
        with linen.intercept_methods(_through):
            _, after = self._layer.apply(self._variables, keys, keys, values, mutable=["cache"])
        self._variables = self._variables | after

    def _held(self) -> tuple[Any, Any, Any]:
        cache = self._variables["cache"]
        return cache["cached_key"], cache["cached_value"], cache["cache_index"]


def _through(call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], context: Any) -> Any:
    given = call(*args, **options)
    return _as_it_came(given, args[0]) if context.module.name in ("query", "key", "value") else given
