"""An implementation in this process, seen by a check: NumPy arrays in and out, every call written down.

A check says what it wants in NumPy; the `Subject` turns arrays into the implementation's own type and back, turns a missing
family or method into NotOffered, holds the implementation to its limits, and keeps the conversation so that a failure can be
shown, shrunk and held again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from array_api_compat import is_writeable_array

from kvref_conformance import interrupts
from kvref_conformance.drivers.guard import Patience, TimedOut, time_limit
from kvref_conformance.drivers.replies import plain, shown
from kvref_conformance.drivers.stdio import OverStdio
from kvref_conformance.exchange import Exchange, On, Reply, Request, error_of, kinds_of, referring, show
from kvref_conformance.interface import FAMILIES, HeldBuffer, Implementation, Level
from kvref_conformance.operations import operations
from kvref_conformance.outcome import Broken, Hung, NotOffered
from kvref_conformance.place import defined_at

WRITTEN_IN_PLACE = ("store", "buffer")  # the arguments that a kernel may change
KEPT_BYTES = 2**24  # a larger array is not kept in the conversation


class Own:
    """An array of the implementation's own type, handed in as it is: for checks of memory and strides."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def fill(self, value: float) -> None:
        """Overwrite it. Raises NotOffered where arrays are immutable."""
        writable(self.array, "arrays that can be written to")
        self.array[...] = value


def writable(array: Any, what: str) -> None:
    """Raises NotOffered, of what cannot be seen, where nothing can be written into an array: JAX's, NumPy's if read-only."""
    if not (hasattr(type(array), "__setitem__") and is_writeable_array(array)):
        raise NotOffered(what)


class Subject:
    """The implementation under one check, with random numbers of the check's own."""

    def __init__(self, implementation: Implementation, rng: np.random.Generator, patience: Patience | None = None) -> None:
        self.implementation = implementation
        self.rng = rng
        self.patience = patience or Patience()
        self.conversation: list[Exchange] = []
        self.held: dict[int, Any] = {}  # what the implementation made, by the id of the request
        self.watchers: list[Callable[[Subject, Exchange], None]] = []  # see every request before it is made
        self.changed: Broken | None = None  # an argument that an operation changed
        self._quiet = False
        self._ids = count(1)
        self.by_value = isinstance(implementation, OverStdio)  # arrays go there and back as copies, and calls one by one
        if isinstance(implementation, OverStdio):
            implementation.begin()

    @property
    def level(self) -> Level:
        return self.implementation.level

    def formats(self, *wanted: str) -> list[str]:
        """Those of the wanted formats that it has. Raises NotOffered where it has none."""
        found = [name for name in wanted if name in self.implementation.formats]
        if not found:
            raise NotOffered(f"format {' or '.join(wanted)}")
        return found

    def in_this_process(self, what: str = "memory shared with the judge") -> None:
        """Raises NotOffered, of what cannot be seen, where the implementation is at the other end of a pipe."""
        if self.by_value:
            raise NotOffered(f"{what}, which cannot be seen through a pipe")

    def factory(self, family: str) -> Callable[..., Any]:
        """What makes an object of a family. Raises NotOffered."""
        assert family in FAMILIES, family
        found: Callable[..., Any] | None = getattr(self.implementation, family, None)
        if found is None:
            raise NotOffered(f"family {family}")
        return found

    def new(self, family: str, **config: Any) -> "Handle":
        """A new object of a family. Raises NotOffered."""
        self.factory(family)
        made = self.call(f"{family}.new", None, config)
        assert isinstance(made, Handle)
        return made

    def own(self, values: Any) -> Own:
        return Own(self.implementation.asarray(values))

    def numpy(self, array: Any) -> Any:
        """An array of the implementation's as NumPy's."""
        return plain(self.implementation, array, Any, "an array")

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Calls that only look, too many for a person to read, are left out of what a failure shows."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def call(self, op: str, on: int | None, args: dict[str, Any], as_is: bool = False) -> Any:
        """Perform an operation and keep the exchange. Arrays come back as NumPy's, or untouched if `as_is`.

        Raises what the implementation raises, NotOffered, or Broken where it hung, left its process, or returned no such thing
        as the interface says.
        """
        written = {name: _written(self, value) for name, value in args.items()}
        request = referring(Request(next(self._ids), op, on, written), self.conversation)
        exchange = Exchange(request, quiet=self._quiet)
        function, hint = self._target(request)
        self.conversation.append(exchange)
        for watch in self.watchers:
            watch(self, exchange)
        limit = self.patience.limit(op)
        try:
            with time_limit(limit), interrupts.prompt():
                return self._answer(exchange, function, hint, args, as_is)
        except TimedOut as late:
            self.patience.hung.add(op)
            raise Hung(op, f"an answer within {limit:g} s", late.got) from None
        except NotOffered:
            self.conversation.remove(exchange)
            raise

    def _answer(self, exchange: Exchange, function: Callable[..., Any], hint: Any, args: dict[str, Any], as_is: bool) -> Any:
        """Make the call, and note the reply."""
        request = exchange.request
        own = {name: self._own(exchange, value) for name, value in args.items()}
        result = self._run(exchange, function, own)
        self._look_for_changes(request, own)
        try:
            if request.name == "new" or hint is HeldBuffer:
                family = request.family if request.name == "new" else "buffer"
                _look_at_made(request.op, family, result, function)
                self.held[request.id] = result
                exchange.reply = Reply(On(request.id))
                return Handle(self, family, request.id)
            if as_is and getattr(result, "nbytes", 0) > KEPT_BYTES:
                exchange.reply = Reply(f"{result.dtype}{list(result.shape)}")
                return result
            exchange.reply = Reply(plain(self.implementation, result, hint, request.op))
        except Broken as malformed:
            exchange.reply = Reply(malformed.got)
            raise
        return result if as_is else exchange.reply.ok

    def _target(self, request: Request) -> tuple[Callable[..., Any], Any]:
        """What to call, and the annotation of what it returns. Raises NotOffered."""
        if request.name == "new":
            return self.factory(request.family), None
        assert request.on is not None
        held, operation = self.held[request.on], operations(request.family)[request.name]
        if not hasattr(type(held), request.name) and not hasattr(held, request.name):
            raise NotOffered(request.op)
        if operation.attribute:
            return (lambda: getattr(held, request.name)), operation.reply
        return getattr(held, request.name), operation.reply

    def _run(self, exchange: Exchange, function: Callable[..., Any], args: dict[str, Any]) -> Any:
        given = exchange.request.given
        positional = [args[name] for name in given]
        named = {name: value for name, value in args.items() if name not in given}
        try:
            return function(*positional, **named)
        except (KeyboardInterrupt, TimedOut, Hung):
            raise
        except BaseException as error:
            said = error_of(error)
            if "NotOffered" in kinds_of(error):
                raise NotOffered(said.message) from error
            if not said.where:  # the arguments do not fit it
                said = replace(said, where=defined_at(function))
            exchange.reply = Reply(error=said)
            if isinstance(error, Exception):
                raise
            raise Broken(exchange.request.op, "a result or an error", f"{said.kind}: {said.message}") from None

    def _look_for_changes(self, request: Request, own: dict[str, Any]) -> None:
        """Whether an array handed in is as it was: LAW-16 is for whoever asks."""
        for name, before in request.args.items():
            after = _seen(self, own[name]) if isinstance(before, np.ndarray) and name not in WRITTEN_IN_PLACE else None
            if after is not None:
                if after.dtype != before.dtype:
                    before = before.astype(after.dtype)
                if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                    self.changed = Broken(f"the array given to {request.op} as {name}", "unchanged", "changed", clause="LAW-16")

    def _own(self, exchange: Exchange, argument: Any) -> Any:
        if isinstance(argument, Handle):
            return self.held[argument.id]
        if isinstance(argument, On):
            return self.held[argument.id]
        if isinstance(argument, Own):
            return argument.array
        if not isinstance(argument, np.ndarray):
            return argument
        try:
            return self.own(argument).array
        except Exception as error:
            said = error_of(error)
            if "NotOffered" in kinds_of(error):
                raise NotOffered(said.message) from error
            exchange.reply = Reply(error=said)
            what, got = f"an array, from {show(argument)}", f"{said.kind}: {said.message}"
            raise Broken("asarray", what, got, where=said.where) from error


def _look_at_made(op: str, family: str, made: Any, factory: Callable[..., Any]) -> None:
    """Raise Broken for what has nothing that could be called, such as None: to pass it by would be to call it right."""
    names = list(operations(family))
    if not any(hasattr(type(made), name) or hasattr(made, name) for name in names):
        expected = f"an object that has operations of {family}: {', '.join(names[:4])}{', ...' if names[4:] else ''}"
        raise Broken(op, expected, shown(made), where=defined_at(factory))


def _written(subject: Subject, argument: Any) -> Any:
    """An argument as it is kept: arrays as they are now, objects by their id."""
    if isinstance(argument, Handle):
        return On(argument.id)
    if isinstance(argument, Own):
        argument = _seen(subject, argument.array)
    if isinstance(argument, np.ndarray):
        return argument.copy() if argument.nbytes <= KEPT_BYTES else f"{argument.dtype}{list(argument.shape)}"
    return list(argument) if isinstance(argument, range) else argument


def _seen(subject: Subject, array: Any) -> Any:
    """An array of the implementation's as NumPy's, or None for one that it takes and cannot give back."""
    try:
        return np.asarray(subject.implementation.to_numpy(array))
    except Exception:
        return None


class Handle:
    """An object of the implementation's: attributes and methods as the interface names them."""

    def __init__(self, subject: Subject, family: str, id: int) -> None:
        self._subject, self._family, self.id = subject, family, id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in operations(self._family):
            raise AttributeError(f"{self._family} has no operation {name!r}")
        if operations(self._family)[name].attribute:
            return self._call(name, (), {})
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def as_is(self, name: str, *args: Any) -> Any:
        """Call a method and leave its result the implementation's own, for checks of memory."""
        return self._call(name, args, {}, as_is=True)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], as_is: bool = False) -> Any:
        everything = dict(zip(operations(self._family)[name].parameters, args, strict=False)) | kwargs
        return self._subject.call(f"{self._family}.{name}", self.id, everything, as_is)
