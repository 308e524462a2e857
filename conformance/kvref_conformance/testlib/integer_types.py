"""The check of LAW-20: a script of calls returns the same results with every integer type."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import require_unsplit_error
from kvref_conformance.calls.messages import format_value, to_call_error
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.testlib.assertions import assert_true
from kvref_conformance.testlib.fixtures import clamp_to_limits

INTEGER_TYPES = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64)


@dataclass(frozen=True)
class RaisedError:
    """The error of a call. All are equal, because LAW-20 does not say which error a call raises."""

    text: str = field(compare=False)

    def __repr__(self) -> str:
        return self.text


Observation = tuple[str, Any]  # a description of an observable, and its value


class TypedIntegers:
    """Makes calls with integers of one type. If a call raises, it is made again with Python integers.

    The failed call must have changed nothing, so that the script continues as if it had not been made.
    """

    def __init__(self, subject: Subject, integer: type[Any]) -> None:
        self.subject, self.integer = subject, integer

    def convert(self, value: Any) -> Any:
        """An integer, or each integer of a list, converted to the type if its range allows it; other values unchanged."""
        if isinstance(value, list):
            return [self.convert(each) for each in value]
        if type(value) is not int or self.integer is int:
            return value
        limits = np.iinfo(self.integer)
        return self.integer(value) if limits.min <= value <= limits.max else value

    def new(self, family: str, **changes: Any) -> ObjectProxy:
        """Create an object with the sizes that are nearest to the wanted ones within the limits."""
        made: ObjectProxy = self._call_in_both_types(
            partial(self.subject.new, family), (), clamp_to_limits(self.subject, family, **changes)
        )
        return made

    def call(self, made: ObjectProxy, name: str, *args: Any, **named: Any) -> Any:
        """The result of a method, or a RaisedError if it raises with Python integers too."""
        try:
            return self._call_in_both_types(getattr(made, name), args, named)
        except (ClauseViolation, NotOffered):
            raise
        except Exception as error:
            require_unsplit_error(error)
            said = to_call_error(error)
            return RaisedError(f"{said.kind}: {said.message}")

    def _call_in_both_types(self, call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            with np.errstate(over="ignore"):
                return call(*map(self.convert, args), **{name: self.convert(value) for name, value in named.items()})
        except (ClauseViolation, NotOffered):
            raise
        except Exception as error:
            require_unsplit_error(error)
            return call(*args, **named)


def assert_same_for_integer_types(subject: Subject, script: Callable[[TypedIntegers], Iterator[Observation]]) -> None:
    """Raise ClauseViolation if a script yields other results with integers of a NumPy type than with Python integers.

    The script should contain sums beyond the range of 8-bit integers.
    """
    subject.require_same_process("integers of NumPy's types")
    plain = list(script(TypedIntegers(subject, int)))
    for integer in INTEGER_TYPES:
        for (what, got), (_, want) in zip(script(TypedIntegers(subject, integer)), plain, strict=True):
            wanted = f"{format_value(want)}, as with Python integers"
            assert_true(_equal_results(got, want), f"{what}, with integers of type {integer.__name__}", wanted, got)


def _equal_results(got: Any, want: Any) -> bool:
    if isinstance(want, tuple | list) and isinstance(got, tuple | list):
        return len(got) == len(want) and all(map(_equal_results, got, want))
    if isinstance(want, np.ndarray):
        return isinstance(got, np.ndarray) and np.array_equal(got, want, equal_nan=want.dtype.kind == "f")
    return bool(got == want)
