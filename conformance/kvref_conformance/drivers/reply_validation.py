"""Conversion of an implementation's results to plain data (arrays, numbers, statistics), with a check of their types."""

from functools import cache
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from kvref_conformance.calls.messages import format_value, to_call_error
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.implementation_api import Implementation, NDArray, Statistics


class StatsReply(dict[str, Any]):
    """Statistics by name. Access to a number that the implementation leaves out raises NotOffered."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise NotOffered(f"stats().{name}")
        return self[name]


class MalformedReply(Exception):
    """A result has the wrong type. The message is what the interface expects."""


def to_plain_data(implementation: Implementation, result: Any, hint: Any, what: str) -> Any:
    """Convert a result to plain data. hint: its annotation in the interface. what: its name in messages.

    Raises ClauseViolation if the result does not match the annotation.
    """
    try:
        return _convert(implementation, result, hint)
    except MalformedReply as expected:
        raise ClauseViolation(what, str(expected), short_repr(result)) from None
    except NotOffered:
        raise
    except Exception as error:  # raised by `to_numpy`, or by an attribute of a strange object
        said = to_call_error(error)
        raise ClauseViolation(what, "a result that to_numpy can read", f"{said.kind}: {said.message}") from error


def _convert(implementation: Implementation, result: Any, hint: Any) -> Any:
    if type(result) is hint and isinstance(result, int | float | str):
        return result
    if hint is type(None):
        return None
    if Statistics in getattr(hint, "__mro__", ()):
        fields = _fields(hint)
        if isinstance(result, dict):  # it arrived through a pipe
            result = SimpleNamespace(**result)
        return StatsReply(
            (name, _convert(implementation, getattr(result, name), fields[name])) for name in fields if hasattr(result, name)
        )
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(result, tuple | list) or len(result) != len(parts):
            raise MalformedReply(f"{len(parts)} arrays")
        return tuple(_convert(implementation, part, each) for part, each in zip(result, parts, strict=True))
    value = _convert_array(implementation, result)
    if hint is int or hint is float:
        return _convert_number(value, hint)
    if hint is Any:
        if not isinstance(value, np.ndarray):
            raise MalformedReply("an array")
        return value
    if hint is str:
        if not isinstance(value, str):
            raise MalformedReply("a string")
        return value
    if get_origin(hint) is dict:
        return {int(name): _convert_number(part, int) for name, part in dict(value).items()}
    return _convert_union(value, get_args(hint))


_fields = cache(get_type_hints)  # uncached, it takes longer than a call


def _convert_union(value: Any, hints: tuple[Any, ...]) -> Any:
    """Convert a result whose annotation is a union: int or None, an array or None, or integers as a list or an array."""
    if value is None and type(None) in hints:
        return None
    if int in hints:
        return _convert_number(value, int)
    if type(None) in hints:
        if not isinstance(value, np.ndarray):
            raise MalformedReply("an array or None")
        return value
    if isinstance(value, np.ndarray | list | tuple | range) and np.ndim(value) == 1:
        return [_convert_number(each, int) for each in value]
    raise MalformedReply("integers, as a list or an array of one axis")


def _convert_number(value: Any, kind: type) -> int | float:
    if type(value) is kind:
        return value  # type: ignore[return-value]
    value = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral if kind is int else Real):
        raise MalformedReply("an integer" if kind is int else "a number")
    return int(value) if isinstance(value, Integral) and kind is int else float(value)


def _convert_array(implementation: Implementation, result: Any) -> Any:
    """Copy an array to NumPy, with narrow floats widened to float32. float64 is not converted: a check reports it as wrong."""
    if not (hasattr(result, "shape") and hasattr(result, "dtype")):
        return result
    # NumPy scalars are accepted from any library, and its `to_numpy` need not support them.
    array: NDArray = np.asarray(result if isinstance(result, np.generic) else implementation.to_numpy(result))
    return array.copy() if array.dtype.kind in "iub" or array.dtype == np.float64 else array.astype(np.float32)


def short_repr(result: Any) -> str:
    """A short description of any object, also if its repr is long or raises."""
    try:
        return f"{type(result).__name__} {format_value(result)}"[:100]
    except Exception:
        return type(result).__name__
