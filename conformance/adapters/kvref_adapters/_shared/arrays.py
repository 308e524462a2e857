"""Base class of adapters whose arrays are NumPy's."""

from typing import Any

import numpy as np

from kvref_conformance.implementation_api import Level


class NumpyArrays:
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32",)

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array
