"""Validation of arguments before anything changes."""

import operator
from typing import Any

import numpy as np

from api_subsets.errors import ConfigError, DtypeMismatch, ShapeMismatch


def whole(value: Any) -> int | None:
    """Return Python's integer for an integer of any type."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def size(name: str, value: Any, least: int = 1) -> int:
    number = whole(value)
    if number is None or number < least:
        raise ConfigError(f"{name}: {value!r}")
    return number


def index(value: Any, stop: int | None, error: type[Exception]) -> int:
    number = whole(value)
    if number is None or number < 0 or (stop is not None and number >= stop):
        raise error(f"expected 0 to {stop}, got {value!r}")
    return number


def tokens(arrays: tuple[Any, ...], shape: tuple[int | None, ...], dtypes: tuple[type, ...] = (np.float16, np.float32)) -> None:
    """Return arrays of one shape, where None allows any length, and of an accepted dtype."""
    for array in arrays:
        if array.dtype not in dtypes:
            raise DtypeMismatch(str(array.dtype))
        if array.ndim != len(shape) or any(want not in (None, got) for got, want in zip(array.shape, shape, strict=True)):
            raise ShapeMismatch(f"expected {shape}, got {array.shape}")
    if len({array.shape for array in arrays}) != 1:
        raise ShapeMismatch(f"expected arrays of one shape, got {[array.shape for array in arrays]}")
