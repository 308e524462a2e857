"""Adapters of MLX's `mx.quantize` and `mx.dequantize` in affine mode, on a CPU, which mlx-lm's quantized caches use.

Scales and biases have the dtype of the rows: float32 for `mlx-quantize`, bfloat16, which most models use, for
`mlx-quantize-bfloat16`. Codes are packed in 32-bit words; the adapter returns the bytes of these words.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import mlx.core as mx

from kvref.errors import ConfigError, DtypeMismatch
from kvref_conformance.implementations.caches.mlx_kernels import Mlx
from kvref_conformance.interface import Level

SIZES = {f"uint{bits}_g{group}": (group, bits) for bits in (8, 4, 2) for group in (32, 64, 128)}


class Quantize(Mlx):
    name = "mlx-quantize"
    version = version("mlx")
    project = "mlx"
    level: Level = "tolerant"  # rounds halves to even
    formats = tuple(f"{name}_float32" for name in SIZES)
    dtype = mx.float32

    def rows(self) -> "Quantize":
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


class QuantizeBFloat16(Quantize):
    name = "mlx-quantize-bfloat16"
    formats = tuple(f"{name}_bfloat16" for name in SIZES)
    limits: ClassVar[Mapping[str, Any]] = {"dtype": "bfloat16"}
    dtype = mx.bfloat16
