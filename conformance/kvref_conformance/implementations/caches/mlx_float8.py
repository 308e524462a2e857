"""MLX's casts to FP8 and back, on a CPU: `to_fp8` and `from_fp8`."""

from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from kvref_conformance.interface import Level


class MlxFloat8:
    name = "mlx-float8"
    version = version("mlx")
    language = "c++"
    project = "mlx"
    level: Level = "exact"
    formats = ("float8_e4m3fn",)

    def __init__(self) -> None:
        mx.set_default_device(mx.cpu)

    def asarray(self, values: Any) -> Any:
        values = np.asarray(values)
        return mx.array(values, dtype=mx.float64 if values.dtype == np.float64 else None)

    def to_numpy(self, array: Any) -> Any:
        return np.array(array)

    def elements(self) -> "MlxFloat8":
        return self

    def encode(self, values: Any, format: str) -> Any:
        return mx.to_fp8(values)

    def decode(self, codes: Any, format: str) -> Any:
        return mx.from_fp8(codes, mx.float32)
