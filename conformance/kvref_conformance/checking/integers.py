"""LAW-20: what a script of calls with integers shows, once for every type that an integer may have."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.checking.expect import true
from kvref_conformance.checking.setup import fitted
from kvref_conformance.conversation.derived import refused_whole
from kvref_conformance.conversation.exchange import show
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import Broken, NotOffered

TYPES = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64)
REFUSED = "an error"

Seen = tuple[str, Any]  # what was looked at, and what there was to see


class Typed:
    """Calls with integers of one type. One that is refused is made again with plain integers, as if it had never been made."""

    def __init__(self, subject: Subject, integer: type[Any]) -> None:
        self.subject, self.integer = subject, integer

    def of(self, value: Any) -> Any:
        """An integer in the type, where it has room for it; of lists each, and anything else as it is."""
        if isinstance(value, list):
            return [self.of(each) for each in value]
        if type(value) is not int or self.integer is int:
            return value
        limits = np.iinfo(self.integer)
        return self.integer(value) if limits.min <= value <= limits.max else value

    def new(self, family: str, **changes: Any) -> Handle:
        """Of sizes as near as the limits allow."""
        made: Handle = self._made(partial(self.subject.new, family), (), fitted(self.subject, family, **changes))
        return made

    def call(self, made: Handle, name: str, *args: Any, **named: Any) -> Any:
        """The result, or REFUSED."""
        try:
            return self._made(getattr(made, name), args, named)
        except (Broken, NotOffered):
            raise
        except Exception as error:
            refused_whole(error)
            return REFUSED

    def _made(self, call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            with np.errstate(over="ignore"):
                return call(*map(self.of, args), **{name: self.of(value) for name, value in named.items()})
        except (Broken, NotOffered):
            raise
        except Exception as error:
            refused_whole(error)
            return call(*args, **named)


def the_same_in_any_type(subject: Subject, script: Callable[[Typed], Iterator[Seen]]) -> None:
    """Raises Broken where a script, in which sums pass what eight bits hold, shows anything else than with plain integers."""
    subject.in_this_process("integers of NumPy's types")
    plain = list(script(Typed(subject, int)))
    for integer in TYPES:
        for (what, got), (_, want) in zip(script(Typed(subject, integer)), plain, strict=True):
            true(_alike(got, want), f"{what}, with integers of {integer.__name__}", f"{show(want)}, as with plain ones", got)


def _alike(got: Any, want: Any) -> bool:
    if isinstance(want, tuple | list) and isinstance(got, tuple | list):
        return len(got) == len(want) and all(map(_alike, got, want))
    if isinstance(want, np.ndarray):
        return isinstance(got, np.ndarray) and np.array_equal(got, want, equal_nan=want.dtype.kind == "f")
    return bool(got == want)
