"""Calls of an implementation: converts arguments and results, limits the time of each call, and records the call trace."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from array_api_compat import is_writeable_array

from kvref_conformance.calls import interrupts
from kvref_conformance.calls.messages import (
    SHOWN_VALUES,
    CallReply,
    CallRequest,
    Exchange,
    Given,
    Misfit,
    ObjectReference,
    Summary,
    error_of,
    kinds_of,
    note_given,
    referring,
    show,
    summarised,
)
from kvref_conformance.calls.operation_table import made_by, operations
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.source_location import defined_at
from kvref_conformance.drivers.json_client import JsonClient
from kvref_conformance.drivers.reply_validation import plain, shown
from kvref_conformance.drivers.resource_limits import Patience, TimedOut, time_limit
from kvref_conformance.implementation_api import Implementation, NDArray, same_bits
from kvref_conformance.outcome import Broken, Declined, Hung, NotOffered

WRITTEN_IN_PLACE = ("store", "buffer")  # the arguments that a kernel may change
STORED = ("codes", "scale", "zero")  # the arguments that are results of an earlier call, and are passed back without a cast
KEPT_BYTES = 2**24  # a larger array is not stored in the call trace
KEPT_IN_ALL = 2**28  # bytes of arrays in a call trace; beyond, only arrays of at most SHOWN_VALUES are stored


class OwnArray:
    """An array of the implementation's own type, which is passed without conversion: for checks of memory and strides."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def fill(self, value: float) -> None:
        """Overwrite all elements. Raises NotOffered if the array is immutable."""
        writable(self.array, "arrays that can be written to")
        self.array[...] = value


def writable(array: Any, what: str) -> None:
    """Raise NotOffered(what) if the array is immutable, as JAX arrays and read-only NumPy arrays are."""
    if not (hasattr(type(array), "__setitem__") and is_writeable_array(array)):
        raise NotOffered(what)


class CallRecorder(ABC):
    """The calls of one call trace. It makes each call, passes it to the watchers and listeners, and records it.

    conversation: the recorded calls. held: the implementation's objects, by the id of the request that made them; made: their
    sizes. watchers see each request before the call, listeners each reply after it. changed: set if an operation modified an
    argument. by_value: whether arrays are copied on the way, as through a pipe.
    """

    def __init__(self, implementation: Implementation, patience: Patience | None) -> None:
        self.implementation = implementation
        self.patience = patience or Patience()
        self.conversation: list[Exchange] = []
        self.held: dict[int, Any] = {}
        self.made: dict[int, dict[str, Any]] = {}
        self.watchers: list[Callable[[Any, Exchange], None]] = []
        self.listeners: list[Callable[[Exchange], None]] = []
        self.changed: Broken | None = None
        self._quiet = False
        self._ids = count(1)
        self._given: Given = {}
        self._kept = 0  # bytes of arrays in the call trace
        self.by_value = isinstance(implementation, JsonClient)
        if isinstance(implementation, JsonClient):
            implementation.begin()

    @abstractmethod
    def call(self, op: str, on: int | None, args: dict[str, Any], as_is: bool = False) -> Any: ...

    @abstractmethod
    def factory(self, family: str) -> Callable[..., Any]: ...

    @abstractmethod
    def own(self, values: Any) -> OwnArray: ...

    def forget_conversation(self) -> None:
        """Clear the call trace. For callers that make more calls than fit in memory."""
        self.conversation, self._kept = [], 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Mark the calls inside the block as quiet: a failure does not show them. For reads that only compare state."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def make(self, op: str, on: int | None, args: dict[str, Any], as_is: bool) -> Any:
        """Call an operation of the implementation, and record the call.

        Raises Declined or NotOffered if the implementation does not provide it, Hung if it does not return in time, Broken if
        its result is malformed or a listener rejects it, and any error that the implementation raises.
        """
        written = {name: _written(self, value) for name, value in args.items()}
        request = referring(CallRequest(next(self._ids), op, on, written), self._given)
        exchange = Exchange(request, quiet=self._quiet)
        function, hint = self._target(request)
        self.conversation.append(exchange)
        for watch in self.watchers:
            watch(self, exchange)
        limit = self.patience.limit(op)
        try:
            with time_limit(limit), interrupts.prompt():
                result = self._answer(exchange, function, hint, args, as_is)
        except TimedOut as late:
            self.patience.hung.add(op)
            raise Hung(op, f"a reply within {limit:g} s", late.got) from None
        except NotOffered:
            self.conversation.remove(exchange)
            raise
        except Broken:
            raise
        except Exception:
            if exchange.reply is not None:
                self._listen(exchange)
            raise
        self._listen(exchange)
        self._keep_reply(exchange)
        return result

    def _keep_reply(self, exchange: Exchange) -> None:
        ok = exchange.reply.ok if exchange.reply else None
        if self._kept > KEPT_IN_ALL:
            exchange.reply = CallReply(summarised(ok))
        self._kept += sum(part.nbytes for part in (ok if isinstance(ok, tuple) else (ok,)) if isinstance(part, np.ndarray))

    def _listen(self, exchange: Exchange) -> None:
        for listen in self.listeners:
            listen(exchange)

    def _answer(self, exchange: Exchange, function: Callable[..., Any], hint: Any, args: dict[str, Any], as_is: bool) -> Any:
        """Make the call, and record the reply in the exchange."""
        request = exchange.request
        own = {name: self._own(exchange, name, value) for name, value in args.items()}
        result = self._run(exchange, function, own)
        self._look_for_changes(request, own)
        try:
            if family := request.family if request.name == "new" else made_by(hint):
                _look_at_made(request.op, family, result, function)
                self.held[request.id] = result
                # The judge computes with the sizes, so they are converted to Python integers, which do not overflow.
                self.made[request.id] = {name: int(size) if isinstance(size, np.integer) else size for name, size in args.items()}
                exchange.reply = CallReply(ObjectReference(request.id))
                return ObjectProxy(self, family, request.id)
            if as_is and getattr(result, "nbytes", 0) > KEPT_BYTES:
                exchange.reply = CallReply(Summary.of(result))
                return result
            exchange.reply = CallReply(plain(self.implementation, result, hint, request.op))
            note_given(exchange, self._given)
        except Broken as malformed:
            exchange.reply = CallReply(Misfit(malformed.got))
            raise
        return result if as_is else exchange.reply.ok

    def kept(self, array: NDArray) -> Any:
        """A copy of the array for the call trace, or its Summary if it is too large."""
        if array.nbytes > KEPT_BYTES or (self._kept > KEPT_IN_ALL and array.size > SHOWN_VALUES):
            return Summary.of(array)
        self._kept += array.nbytes
        return array.copy()

    def _target(self, request: CallRequest) -> tuple[Callable[..., Any], Any]:
        """The function to call, and the annotation of its result. Raises NotOffered."""
        family, name = request.family, request.name
        if name == "new":
            return self.factory(family), None
        assert request.on is not None
        held, operation = self.held[request.on], operations(family)[name]
        if not hasattr(type(held), name) and not hasattr(held, name):
            raise Declined(request.op)
        if operation.attribute:
            return (lambda: getattr(held, name)), operation.reply
        try:
            method = getattr(held, name)
        except Exception:  # a property that raises: its error is the error of the call, so raise it in the call
            return (lambda *args, **named: getattr(held, name)), operation.reply
        if not callable(method):
            raise Declined(request.op)  # an unrelated attribute of the same name
        return method, operation.reply

    def _run(self, exchange: Exchange, function: Callable[..., Any], args: dict[str, Any]) -> Any:
        given = exchange.request.given
        positional = [args[name] for name in given]
        named = {name: value for name, value in args.items() if name not in given} if len(given) < len(args) else {}
        try:
            return function(*positional, **named)
        except (KeyboardInterrupt, TimedOut, Hung):
            raise
        except BaseException as error:
            said = error_of(error)
            if "NotOffered" in kinds_of(error):
                raise (NotOffered if exchange.request.name == "new" else Declined)(said.message) from error
            if not said.where:  # no line of the implementation ran: its signature does not accept the arguments
                said = replace(said, where=defined_at(function))
            exchange.reply = CallReply(error=said)
            if isinstance(error, Exception):
                raise
            raise Broken(exchange.request.op, "a result or an error", f"{said.kind}: {said.message}") from None

    def _look_for_changes(self, request: CallRequest, own: dict[str, Any]) -> None:
        """Set `changed` if the call modified an array argument. Callers of `make` decide whether to report it (LAW-16)."""
        for name, before in request.args.items():
            after = _seen(self, own[name]) if isinstance(before, np.ndarray) and name not in WRITTEN_IN_PLACE else None
            if after is not None and not same_bits(before, after):
                if after.dtype != before.dtype:
                    with np.errstate(over="ignore"):
                        before = before.astype(after.dtype)
                if after.dtype.name == "bfloat16":  # NumPy cannot compare NaNs of this dtype
                    before, after = before.astype(np.float32), after.astype(np.float32)
                if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                    self.changed = Broken(f"the array passed to {request.op} as {name}", "unchanged", "changed", clause="LAW-16")

    def _own(self, exchange: Exchange, name: str, argument: Any) -> Any:
        if isinstance(argument, ObjectProxy):
            return self.held[argument.id]
        if isinstance(argument, ObjectReference):
            return self.held[argument.id]
        if isinstance(argument, OwnArray):
            return argument.array
        if not isinstance(argument, np.ndarray):
            return argument
        try:
            return self.implementation.asarray(argument) if name in STORED else self.own(argument).array
        except Exception as error:
            said = error_of(error)
            if "NotOffered" in kinds_of(error):
                raise NotOffered(said.message) from error
            exchange.reply = CallReply(error=said)
            what, got = f"an array with the values {show(argument)}", f"{said.kind}: {said.message}"
            raise Broken("asarray", what, got, where=said.where) from error


def _look_at_made(op: str, family: str, made: Any, factory: Callable[..., Any]) -> None:
    """Raise Broken if a factory returned an object without any operation of the family, such as None.

    Without this test all of its operations would count as not offered, and the wrong factory would not fail.
    """
    names = list(operations(family))
    if not any(hasattr(type(made), name) or hasattr(made, name) for name in names):
        expected = f"an object with operations of {family}: {', '.join(names[:4])}{', ...' if names[4:] else ''}"
        raise Broken(op, expected, shown(made), where=defined_at(factory))


def _written(subject: CallRecorder, argument: Any) -> Any:
    """An argument as it is recorded: arrays are copied, objects are replaced by their id."""
    if isinstance(argument, ObjectProxy):
        return ObjectReference(argument.id)
    if isinstance(argument, OwnArray):
        argument = _seen(subject, argument.array)
    if isinstance(argument, np.ndarray):
        return subject.kept(argument)
    return list(argument) if isinstance(argument, range) else argument


def _seen(subject: CallRecorder, array: Any) -> Any:
    """An array of the implementation as a NumPy array, or None if `to_numpy` does not support it."""
    try:
        return np.asarray(subject.implementation.to_numpy(array))
    except Exception:
        return None
