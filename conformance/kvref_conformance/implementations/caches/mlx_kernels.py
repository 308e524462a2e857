"""Adapters of MLX's casts, and of its attention as mlx-lm's models call it, on a CPU.

`mlx-casts` is `astype`, and `to_fp8` and `from_fp8`, whose FP8 is E4M3. `mlx-lm-sdpa` is mlx-lm's `scaled_dot_product_attention`,
which calls `mx.fast`, with "causal" or the mask of `create_causal_mask`, over the view that a KVCache returns: tokens past the
length are not in it.
"""

from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from kvref.errors import ShapeMismatch
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}


class Mlx:
    language = "c++"
    level: Level = "exact"

    def __init__(self) -> None:
        mx.set_default_device(mx.cpu)

    def asarray(self, values: Any) -> Any:
        values = np.asarray(values)
        return mx.array(values, dtype=mx.float64 if values.dtype == np.float64 else None)

    def to_numpy(self, array: Any) -> Any:
        return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


class Casts(Mlx):
    name = "mlx-casts"
    version = version("mlx")
    project = "mlx"
    formats = ("float16", "bfloat16", "float8_e4m3fn")

    def elements(self) -> "Casts":
        return self

    def encode(self, values: Any, format: str) -> Any:
        return mx.to_fp8(values) if format == "float8_e4m3fn" else values.astype(DTYPES[format]).view(mx.uint16)

    def decode(self, codes: Any, format: str) -> Any:
        return mx.from_fp8(codes, mx.float32) if format == "float8_e4m3fn" else codes.view(DTYPES[format]).astype(mx.float32)


class Sdpa(Mlx):
    name = "mlx-lm-sdpa"
    version = version("mlx-lm")
    project = "mlx-lm"
    formats = ("float32",)

    def attention(self) -> "Attention":
        return Attention()


class Attention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        if len(keys) != len(values) and length < len(keys):
            raise NotOffered("rejecting keys and values of different lengths, if they are equal up to `length`")
        return _attend(query, keys[:length], values[:length], scale, "causal" if causal and len(query) > 1 else None)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        mask = create_causal_mask(len(query), len(keys) - len(query), window_size=window)
        return _attend(query, keys, values, scale, mask)

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return _attend(query, keys, values, scale, "causal" if causal and len(query) > 1 else None, sinks=logit_sink)


def _attend(query: Any, keys: Any, values: Any, scale: float, mask: Any, **sinks: Any) -> Any:
    try:
        given = [array.swapaxes(0, 1)[None] for array in (query, keys, values)]
        output = scaled_dot_product_attention(*given, cache=None, scale=scale, mask=mask, **sinks)
        mx.eval(output)
    except ValueError as error:
        raise ShapeMismatch(str(error)) from error
    return output[0].swapaxes(0, 1)
