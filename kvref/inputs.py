"""What comes in: checked for shape and dtype before anything is allocated or written (LAW-10, FMT-LEVEL-04)."""

from collections.abc import Sequence
from reprlib import repr

import numpy as np

from kvref.array import Array
from kvref.backend import Backend
from kvref.errors import ShapeMismatch
from kvref.formats.base import widen


def accept(name: str, values: Array, shape: Sequence[int | str], backend: Backend) -> Array:
    """`values` as a float32 array of the backend. A list of numbers is taken as float32.

    A string in `shape` names an axis of any length. Raises ShapeMismatch or DtypeMismatch.
    """
    if not hasattr(values, "shape"):
        try:
            values = np.asarray(values, dtype=np.float32)
        except (TypeError, ValueError):
            raise ShapeMismatch(f"{name}: expected an array or even lists of numbers, got {repr(values)}") from None
    ShapeMismatch.check(name, tuple(values.shape), shape)
    if isinstance(values, np.ndarray) and values.dtype != np.float32:
        values = widen(values, name)  # before another library sees a dtype it may not have
    values = backend.asarray(values)
    return values if values.dtype == backend.xp.float32 else widen(values, name)


def accept_pair(keys: Array, values: Array, shape: Sequence[int | str], backend: Backend) -> tuple[Array, Array]:
    """Keys and values of one shape: the same number of tokens, heads and elements."""
    keys = accept("keys", keys, shape, backend)
    return keys, accept("values", values, tuple(keys.shape), backend)
