"""Adapter of ml_dtypes, the small floats of JAX and TensorFlow: casts value by value."""

from importlib.metadata import version
from typing import Any

import ml_dtypes
import numpy as np

from kvref_conformance.implementation_api import Level


class MlDtypes:
    name = "ml_dtypes"
    version = version("ml_dtypes")
    language = "c++"
    project = "ml_dtypes"
    level: Level = "exact"
    formats = ("float8_e4m3fn", "float8_e5m2", "bfloat16")

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array

    def elements(self) -> "MlDtypes":
        return self

    def encode(self, values: Any, format: str) -> Any:
        cast = values.astype(getattr(ml_dtypes, format))
        return cast.view(np.uint8 if cast.itemsize == 1 else np.uint16)

    def decode(self, codes: Any, format: str) -> Any:
        return codes.view(getattr(ml_dtypes, format)).astype(np.float32)
