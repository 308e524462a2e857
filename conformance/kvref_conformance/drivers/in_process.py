"""An implementation in this process, seen by a check: NumPy arrays in and out, every call written down.

A check says what it wants in NumPy; the `Subject` turns arrays into the implementation's own type and back, turns a missing
family or method into NotOffered, and keeps the calls so that a failure can show them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvref_conformance.interface import FAMILIES, Implementation, Level

SHOWN_VALUES = 8  # an array up to this size is written out in the list of calls


class NotOffered(Exception):
    """The implementation does not have what the check needs."""


class Own:
    """An array of the implementation's own type, handed in as it is: for checks of memory and strides."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def fill(self, value: float) -> None:
        """Overwrite it. Raises NotOffered where arrays are immutable."""
        try:
            self.array[...] = value
        except TypeError as error:
            raise NotOffered("arrays that can be written to") from error


class Subject:
    """The implementation under one check, with random numbers of the check's own."""

    def __init__(self, implementation: Implementation, rng: np.random.Generator) -> None:
        self.implementation = implementation
        self.rng = rng
        self.calls: list[str] = []
        self._recording = True
        self._handles = 0

    @property
    def level(self) -> Level:
        return self.implementation.level

    def formats(self, *wanted: str) -> list[str]:
        """Those of the wanted formats that it has. Raises NotOffered where it has none."""
        found = [name for name in wanted if name in self.implementation.formats]
        if not found:
            raise NotOffered(f"format {' or '.join(wanted)}")
        return found

    def factory(self, family: str) -> Callable[..., Any]:
        """What makes an object of a family. Raises NotOffered."""
        assert family in FAMILIES, family
        found: Callable[..., Any] | None = getattr(self.implementation, family, None)
        if found is None:
            raise NotOffered(f"family {family}")
        return found

    def new(self, family: str, **config: Any) -> "Handle":
        """A new object of a family. Raises NotOffered."""
        factory = self.factory(family)
        self._handles += 1
        name = f"{family}{self._handles}"
        result = self._call(f"{name} = {family}", factory, (), {k: self.unwrap(v) for k, v in config.items()})
        return Handle(self, name, result)

    def own(self, values: Any) -> Own:
        return Own(self.implementation.asarray(values))

    def numpy(self, result: Any) -> Any:
        """A result with every array in it made NumPy's, and a narrow float widened. float64 stays, for a check to refuse."""
        if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
            return type(result)(self.numpy(part) for part in result)
        if hasattr(result, "shape") and hasattr(result, "dtype"):
            array = np.asarray(self.implementation.to_numpy(result))
            return array.copy() if array.dtype.kind in "iub" or array.dtype == np.float64 else array.astype(np.float32)
        return result

    def unwrap(self, argument: Any) -> Any:
        if isinstance(argument, Handle):
            return argument.held
        if isinstance(argument, Own):
            return argument.array
        return self.own(argument).array if isinstance(argument, np.ndarray) else argument

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Calls that only look, too many for a person to read, are left out of the list."""
        before, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = before

    def call(self, target: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        converted = [self.unwrap(argument) for argument in args], {k: self.unwrap(v) for k, v in kwargs.items()}
        return self._call(target, function, *converted, shown=(args, kwargs))

    def _call(self, target: str, function: Callable[..., Any], args: Any, kwargs: Any, shown: Any = None) -> Any:
        shown_args, shown_kwargs = shown or (args, kwargs)
        words = [*map(show, shown_args), *(f"{k}={show(v)}" for k, v in shown_kwargs.items())]
        if self._recording:
            self.calls.append(f"{target}({', '.join(words)})")
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if self._recording:
                self.calls[-1] += f"  raised {type(error).__name__}"
            if "NotOffered" in kinds_of(error):
                raise NotOffered(str(error)) from error
            raise


class Handle:
    """An object of the implementation's: attributes and methods as the interface names them."""

    def __init__(self, subject: Subject, name: str, held: Any) -> None:
        self._subject, self._name, self.held = subject, name, held

    def __getattr__(self, name: str) -> Any:
        subject, target = self._subject, f"{self._name}.{name}"
        if not hasattr(type(self.held), name) and not hasattr(self.held, name):
            raise NotOffered(target)
        attribute = getattr(self.held, name)
        if not callable(attribute):
            return subject.numpy(attribute)

        def method(*args: Any, **kwargs: Any) -> Any:
            result = subject.call(target, attribute, *args, **kwargs)
            if name == "acquire":
                return Handle(subject, f"{self._name}.buffer", result)
            return subject.numpy(result)

        return method

    def as_is(self, name: str, *args: Any) -> Any:
        """Call a method and leave its result the implementation's own, for checks of memory."""
        if not hasattr(self.held, name):
            raise NotOffered(f"{self._name}.{name}")
        return self._subject.call(f"{self._name}.{name}", getattr(self.held, name), *args)


def kinds_of(error: BaseException) -> list[str]:
    """The names by which an exception is known: its class and its bases."""
    return [kind.__name__ for kind in type(error).__mro__]


def _brackets(array: Any) -> str:
    """Nested brackets, each number as short as its dtype allows: 0.1 and not 0.10000000149011612."""
    if array.ndim == 0:
        return str(array[()])
    return f"[{', '.join(_brackets(part) for part in array)}]"


def show(value: Any) -> str:
    """An argument or a result as a person can read it: small arrays in full, large ones by shape."""
    if isinstance(value, Handle):
        return value._name
    if isinstance(value, Own):
        return show(value.array)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.size > SHOWN_VALUES:
            return f"{array.dtype}{list(array.shape)}"
        return _brackets(array)
    if isinstance(value, tuple | list):
        words = ", ".join(map(show, value))
        return f"({words})" if isinstance(value, tuple) else f"[{words}]"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
