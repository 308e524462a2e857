"""The object by which kvref calls the cache of a student."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class Adapter:
    """An implementation with one family, whose arrays are those of NumPy. limits: see `kvref_conformance.limits`."""

    name, version, language, level = "lab", "0", "python", "exact"

    def __init__(self, family: str, factory: Callable[..., Any], formats: Sequence[str], limits: Mapping[str, Any]) -> None:
        self.formats, self.limits = tuple(formats), dict(limits)
        setattr(self, family, factory)

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array)
