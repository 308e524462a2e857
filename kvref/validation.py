"""Checks and conversion of input arrays.

Every cache calls these functions before it allocates or writes anything, so that an invalid input changes nothing (LAW-10,
FMT-LEVEL-04).
"""

from collections.abc import Sequence
from reprlib import repr
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.backend import Backend
from kvref.errors import DtypeMismatch, NonFinite, ShapeMismatch
from kvref.formats.base import widen


def accept(name: str, values: Array, shape: Sequence[int | str], backend: Backend) -> Array:
    """Return `values` as a float32 array of the backend, detached from any autograd graph.

    values: a float32, float16 or bfloat16 array of NumPy or of the backend's library, or nested lists of Python numbers and such
    arrays. Python numbers are rounded to float32. shape: the required length of each axis, or a string for an axis of any length.
    name: the argument's name, for messages.

    Raises ShapeMismatch, DtypeMismatch, or NonFinite if a finite Python number overflows float32.
    """
    if not hasattr(values, "shape"):
        values = _from_list(name, values)
    ShapeMismatch.check(name, tuple(values.shape), shape)
    if isinstance(values, np.ndarray) and values.dtype != np.float32:
        values = widen(values, name)  # before conversion to a library that may lack the dtype
    if hasattr(values, "detach"):
        values = values.detach()  # PyTorch: a stored graph would keep the activations of every step alive
    values = backend.asarray(values)
    return values if values.dtype == backend.xp.float32 else widen(values, name)


def accept_pair(keys: Array, values: Array, shape: Sequence[int | str], backend: Backend) -> tuple[Array, Array]:
    """`accept` for keys and values, which must have the same shape. Raises as `accept` does."""
    keys = accept("keys", keys, shape, backend)
    return keys, accept("values", values, tuple(keys.shape), backend)


def _from_list(name: str, values: Any) -> NDArray[np.float32]:
    """Nested lists of equal lengths as one array. Raises ShapeMismatch, DtypeMismatch or NonFinite."""
    no_array = ShapeMismatch(f"{name}: expected an array or even lists of numbers, got {repr(values)}")
    too_large = NonFinite(f"{name}: expected numbers in the range of float32, got {repr(values)}")
    if not _is_list(values):
        raise no_array
    _look_into(name, values)
    try:
        numbers = np.asarray(values, np.float64)
    except OverflowError:
        raise too_large from None
    except (TypeError, ValueError, RuntimeError):  # uneven lists, or arrays that NumPy cannot read (on a GPU)
        raise no_array from None
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float32)
    if np.isinf(rounded).sum() > np.isinf(numbers).sum():
        raise too_large
    return rounded


def _look_into(name: str, values: Sequence[Any]) -> None:
    """Raise DtypeMismatch for an element that is no number, or an array of another dtype: NumPy would cast it silently."""
    for each in values:
        if hasattr(each, "dtype"):
            widen(each, name)
        elif _is_list(each):
            _look_into(name, each)
        elif isinstance(each, bool) or not isinstance(each, int | float):
            raise DtypeMismatch(f"{name}: expected numbers, got {repr(each)}")


def _is_list(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes)
