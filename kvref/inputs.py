"""What comes in: checked for shape and dtype before anything is allocated or written (LAW-10, FMT-LEVEL-04)."""

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
    """`values` as a float32 array of the backend, for its numbers alone: no gradient flows through a cache.

    A list may hold Python's numbers, which are rounded to float32, and arrays that would be taken by themselves. A string in
    `shape` names an axis of any length. Raises ShapeMismatch, DtypeMismatch, or NonFinite for a number beyond float32's range.
    """
    if not hasattr(values, "shape"):
        values = _from_list(name, values)
    ShapeMismatch.check(name, tuple(values.shape), shape)
    if isinstance(values, np.ndarray) and values.dtype != np.float32:
        values = widen(values, name)  # before another library sees a dtype it may not have
    if hasattr(values, "detach"):
        values = values.detach()  # PyTorch's: a cache that kept the graph would keep every step of the model alive
    values = backend.asarray(values)
    return values if values.dtype == backend.xp.float32 else widen(values, name)


def accept_pair(keys: Array, values: Array, shape: Sequence[int | str], backend: Backend) -> tuple[Array, Array]:
    """Keys and values of one shape: the same number of tokens, heads and elements."""
    keys = accept("keys", keys, shape, backend)
    return keys, accept("values", values, tuple(keys.shape), backend)


def _from_list(name: str, values: Any) -> NDArray[np.float32]:
    """Even lists as one array."""
    no_array = ShapeMismatch(f"{name}: expected an array or even lists of numbers, got {repr(values)}")
    too_large = NonFinite(f"{name}: expected numbers within float32, got {repr(values)}")
    if not _is_list(values):
        raise no_array
    _look_into(name, values)
    try:
        numbers = np.asarray(values, np.float64)
    except OverflowError:
        raise too_large from None
    except (TypeError, ValueError, RuntimeError):  # uneven; or arrays that NumPy cannot look at, on another device perhaps
        raise no_array from None
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float32)
    if np.isinf(rounded).sum() > np.isinf(numbers).sum():
        raise too_large
    return rounded


def _look_into(name: str, values: Sequence[Any]) -> None:
    """Raise DtypeMismatch for what is no number, and for an array of a dtype that is not taken: NumPy would cast it unseen."""
    for each in values:
        if hasattr(each, "dtype"):
            widen(each, name)
        elif _is_list(each):
            _look_into(name, each)
        elif isinstance(each, bool) or not isinstance(each, int | float):
            raise DtypeMismatch(f"{name}: expected numbers, got {repr(each)}")


def _is_list(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes)
