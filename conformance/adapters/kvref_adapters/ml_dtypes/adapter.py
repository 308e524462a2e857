"""Adapter of ml_dtypes, the small floats of JAX and TensorFlow: casts value by value."""

from importlib.metadata import version
from typing import Any

import ml_dtypes
import numpy as np

from kvref_adapters._shared.arrays import NumpyArrays


class MlDtypes(NumpyArrays):
    name = "ml_dtypes"
    version = version("ml_dtypes")
    language = "c++"
    project = "ml_dtypes"
    formats = ("float8_e4m3fn", "float8_e5m2", "bfloat16")

    def elements(self) -> "MlDtypes":
        return self

    def encode(self, values: Any, format: str) -> Any:
        cast = values.astype(getattr(ml_dtypes, format))
        return cast.view(np.uint8 if cast.itemsize == 1 else np.uint16)

    def decode(self, codes: Any, format: str) -> Any:
        return codes.view(getattr(ml_dtypes, format)).astype(np.float32)
