"""Adapters of the JAX functions from which caches are built, on a CPU: attention, access by slot, and casts to narrow floats.

Attention is `jax.nn.dot_product_attention` with its own masks. They count from the first token, so queries of the last tokens are
padded with zero rows in front. Slots are written by `.at[].set` with modes that ignore negative slots, and read by `jnp.take`;
buffers are written by `lax.dynamic_update_slice`. Casts are `astype`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvref.errors import DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref_adapters._shared.attention import check_value_width, padding_rows
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level


class JaxFunctions:
    version = jax.__version__
    language = "python"
    project = "jax"
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32",)

    def __init__(self) -> None:
        jax.config.update("jax_enable_x64", True)  # otherwise JAX converts float64 to float32 before the cache can reject it

    def asarray(self, values: Any) -> Any:
        return jnp.array(values)

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)


class JaxAttention(JaxFunctions):
    name = "jax-attention"

    def attention(self) -> "JaxDotProduct":
        return JaxDotProduct()


class JaxDotProduct:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        last = _at_the_end(query, length) if causal else query
        return _attend(last, keys, values, len(query), scale=scale, is_causal=causal, key_value_seq_lengths=_one(length))

    def window_attention(
        self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int
    ) -> Any:  # fmt: skip
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        last = _at_the_end(query, len(keys))
        return _attend(last, keys, values, len(query), scale=scale, is_causal=True, local_window_size=(window - 1, 0))


def _at_the_end(query: Any, length: int) -> Any:
    return jnp.concatenate([jnp.zeros((padding_rows(query, length), *query.shape[1:]), query.dtype), query])


def _one(length: int) -> Any:
    return jnp.array([length], jnp.int32)  # for a batch of one sequence


def _attend(query: Any, keys: Any, values: Any, count: int, **options: Any) -> Any:
    check_value_width(query, keys, values)
    try:
        return jax.nn.dot_product_attention(query, keys, values, **options)[len(query) - count :]
    except (TypeError, ValueError) as error:
        raise (DtypeMismatch if "dtype should" in str(error) else ShapeMismatch)(str(error)) from error


class JaxSlots(JaxFunctions):
    name = "jax-slots"
    formats = ("float32", "float16", "bfloat16")

    def kernels(self) -> "JaxIndexing":
        return JaxIndexing()


class JaxIndexing:
    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        try:
            return store.at[slots].set(new, mode="drop", wrap_negative_indices=False)
        except (TypeError, ValueError, IndexError) as error:
            raise _in_our_words(error) from error

    def gather(self, store: Any, slots: Any) -> Any:
        try:
            return jnp.take(store, slots, axis=0)
        except (TypeError, ValueError, IndexError) as error:
            raise _in_our_words(error) from error

    def update(self, buffer: Any, new: Any, position: int) -> Any:
        return lax.dynamic_update_slice(buffer, new, (0, 0, position, 0))


def _in_our_words(error: Exception) -> Exception:
    said = str(error)
    if "out of bound" in said or "out-of-bound" in said:
        return SlotOutOfRange(said)
    return (DtypeMismatch if "type" in said else ShapeMismatch)(said)


class JaxCasts(JaxFunctions):
    name = "jax-casts"
    formats = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")

    def elements(self) -> "JaxCasts":
        return self

    def encode(self, values: Any, format: str) -> Any:
        cast = values.astype(format)
        return cast.view(jnp.uint8 if cast.itemsize == 1 else jnp.uint16)

    def decode(self, codes: Any, format: str) -> Any:
        return codes.view(format).astype(jnp.float32)
