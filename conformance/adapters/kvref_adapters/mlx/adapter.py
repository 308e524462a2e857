"""Adapters of MLX on a CPU: casts, and quantization in groups.

`mlx-casts` is `astype`, and `to_fp8` and `from_fp8`, whose FP8 is E4M3.

`mlx-quantize` is `mx.quantize` and `mx.dequantize` in affine mode, which mlx-lm's quantized caches use. Scales and biases have
the dtype of the rows: float32 for `mlx-quantize`, bfloat16, which most models use, for `mlx-quantize-bfloat16`. Codes are packed
in 32-bit words; the adapter returns the bytes of these words.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from kvref.errors import ConfigError, DtypeMismatch
from kvref_conformance.implementation_api import Level

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


class MlxCasts(Mlx):
    name = "mlx-casts"
    version = version("mlx")
    project = "mlx"
    formats = ("float16", "bfloat16", "float8_e4m3fn")

    def elements(self) -> "MlxCasts":
        return self

    def encode(self, values: Any, format: str) -> Any:
        return mx.to_fp8(values) if format == "float8_e4m3fn" else values.astype(DTYPES[format]).view(mx.uint16)

    def decode(self, codes: Any, format: str) -> Any:
        return mx.from_fp8(codes, mx.float32) if format == "float8_e4m3fn" else codes.view(DTYPES[format]).astype(mx.float32)


SIZES = {f"uint{bits}_g{group}": (group, bits) for bits in (8, 4, 2) for group in (32, 64, 128)}


class MlxQuantize(Mlx):
    name = "mlx-quantize"
    version = version("mlx")
    project = "mlx"
    level: Level = "tolerant"  # rounds halves to even
    formats = tuple(f"{name}_float32" for name in SIZES)
    dtype = mx.float32

    def rows(self) -> "MlxQuantize":
        return self

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, Any]:
        group, bits = SIZES[format.rpartition("_")[0]]
        try:
            words, scale, zero = mx.quantize(rows, group, bits)
            mx.eval(words, scale, zero)
        except (ValueError, RuntimeError) as error:
            raise _named(error) from error
        return words.view(mx.uint8), scale, zero

    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        scale, zero = (each.astype(self.dtype) for each in (scale, zero))  # the judge passes them widened to float32
        return mx.dequantize(codes.view(mx.uint32), scale, zero, *SIZES[format.rpartition("_")[0]])


def _named(error: Exception) -> Exception:
    said = str(error)
    return ConfigError(said) if "divisible" in said else DtypeMismatch(said) if "floating point inputs" in said else error


class MlxQuantizeBFloat16(MlxQuantize):
    name = "mlx-quantize-bfloat16"
    formats = tuple(f"{name}_bfloat16" for name in SIZES)
    limits: ClassVar[Mapping[str, Any]] = {"dtype": "bfloat16"}
    dtype = mx.bfloat16
