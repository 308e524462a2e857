"""Calls of an implementation: converts arguments and results, limits the time of each call, and records the call trace."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import count
from typing import Any

import numpy as np
from array_api_compat import is_writeable_array

from kvref_conformance.calls import interrupts
from kvref_conformance.calls.messages import (
    MAX_ARRAY_VALUES,
    ArraySummary,
    CallReply,
    CallRequest,
    ChosenValues,
    Exchange,
    MalformedResult,
    ObjectReference,
    error_kinds,
    format_value,
    record_chosen_value,
    summarize_arrays,
    to_call_error,
    with_references,
)
from kvref_conformance.calls.operation_table import operations, result_protocol
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.source_location import defined_at
from kvref_conformance.drivers.json_client import JsonClient
from kvref_conformance.drivers.reply_validation import short_repr, to_plain_data
from kvref_conformance.drivers.resource_limits import CallTimeouts, TimedOut, time_limit
from kvref_conformance.exceptions import CallTimeout, ClauseViolation, NotOffered, OperationDeclined
from kvref_conformance.implementation_api import Implementation, NDArray, same_bits

WRITTEN_IN_PLACE = ("store", "buffer")  # the arguments that a kernel may change
FORMAT_ARRAYS = (
    "codes",
    "scale",
    "zero",
)  # the arguments that are results of an earlier call, and are passed back without a cast
MAX_RECORDED_BYTES = 2**24  # a larger array is not stored in the call trace
MAX_RECORDED_TOTAL = 2**28  # bytes of arrays in a call trace; beyond, only arrays of at most MAX_ARRAY_VALUES are stored


class OwnArray:
    """An array of the implementation's own type, which is passed without conversion: for checks of memory and strides."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def fill(self, value: float) -> None:
        """Overwrite all elements. Raises NotOffered if the array is immutable."""
        require_writable(self.array, "arrays that can be written to")
        self.array[...] = value


def require_writable(array: Any, what: str) -> None:
    """Raise NotOffered(what) if the array is immutable, as JAX arrays and read-only NumPy arrays are."""
    if not (hasattr(type(array), "__setitem__") and is_writeable_array(array)):
        raise NotOffered(what)


class CallRecorder(ABC):
    """The calls of one call trace. It makes each call, passes it to the watchers and listeners, and records it.

    call_trace: the recorded calls. objects: the implementation's objects, by the id of the request that made them; configs:
    their sizes. watchers see each request before the call, listeners each reply after it. modified_argument: set if an operation
    modified an argument. called: the operations that were called. by_value: whether arrays are copied on the way, as through a
    pipe.
    """

    def __init__(self, implementation: Implementation, timeouts: CallTimeouts | None) -> None:
        self.implementation = implementation
        self.patience = timeouts or CallTimeouts()
        self.call_trace: list[Exchange] = []
        self.objects: dict[int, Any] = {}
        self.configs: dict[int, dict[str, Any]] = {}
        self.watchers: list[Callable[[Any, Exchange], None]] = []
        self.listeners: list[Callable[[Exchange], None]] = []
        self.modified_argument: ClauseViolation | None = None
        self.called = set[str]()
        self._quiet = False
        self._records = True
        self._ids = count(1)
        self._chosen_values: ChosenValues = {}
        self._recorded_bytes = 0  # bytes of arrays in the call trace
        self.by_value = isinstance(implementation, JsonClient)
        if isinstance(implementation, JsonClient):
            implementation.send_hello()

    @abstractmethod
    def call(self, op: str, on: int | None, args: dict[str, Any], as_is: bool = False) -> Any: ...

    @abstractmethod
    def factory(self, family: str) -> Callable[..., Any]: ...

    @abstractmethod
    def to_own_array(self, values: Any) -> OwnArray: ...

    def clear_trace(self) -> None:
        """Clear the call trace. For callers that make more calls than fit in memory."""
        self.call_trace, self._recorded_bytes = [], 0

    @contextmanager
    def quiet_reads(self) -> Iterator[None]:
        """Mark the calls inside the block as quiet: a failure does not show them. For reads that only compare state."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @contextmanager
    def unrecorded_calls(self) -> Iterator[None]:
        """Make the calls inside the block without recording or judging them: faster, for the many calls of several threads."""
        self._records = False
        try:
            yield
        finally:
            self._records = True

    def _make_unrecorded(self, op: str, on: int | None, args: dict[str, Any], as_is: bool) -> Any:
        exchange = Exchange(CallRequest(0, op, on, args))
        function, hint = self._find_function(exchange.request)
        own = {name: self._convert_argument(exchange, name, value) for name, value in args.items()}
        result = self._run(exchange, function, own)
        return result if as_is else to_plain_data(self.implementation, result, hint, op)

    def make(self, op: str, on: int | None, args: dict[str, Any], as_is: bool) -> Any:
        """Call an operation of the implementation, and record the call.

        Raises OperationDeclined or NotOffered if the implementation does not provide it, CallTimeout if it does not return in
        time, ClauseViolation if its result is malformed or a listener rejects it, and any error that the implementation raises.
        """
        if not self._records:
            return self._make_unrecorded(op, on, args, as_is)
        written = {name: _record_argument(self, value) for name, value in args.items()}
        request = with_references(CallRequest(next(self._ids), op, on, written), self._chosen_values)
        exchange = Exchange(request, quiet=self._quiet)
        function, hint = self._find_function(request)
        self.call_trace.append(exchange)
        self.called.add(op)
        for watch in self.watchers:
            watch(self, exchange)
        limit = self.patience.limit(op)
        try:
            with time_limit(limit), interrupts.allow_interrupts():
                result = self._make_and_record(exchange, function, hint, args, as_is)
        except TimedOut as late:
            self.patience.hung_operations.add(op)
            raise CallTimeout(op, f"a reply within {limit:g} s", late.got) from None
        except NotOffered:
            self.call_trace.remove(exchange)
            raise
        except ClauseViolation:
            raise
        except Exception:
            if exchange.reply is not None:
                self._notify_listeners(exchange)
            raise
        self._notify_listeners(exchange)
        self._record_reply(exchange)
        return result

    def _record_reply(self, exchange: Exchange) -> None:
        ok = exchange.reply.ok if exchange.reply else None
        if self._recorded_bytes > MAX_RECORDED_TOTAL:
            exchange.reply = CallReply(summarize_arrays(ok))
        self._recorded_bytes += sum(
            part.nbytes for part in (ok if isinstance(ok, tuple) else (ok,)) if isinstance(part, np.ndarray)
        )

    def _notify_listeners(self, exchange: Exchange) -> None:
        for listen in self.listeners:
            listen(exchange)

    def _make_and_record(
        self, exchange: Exchange, function: Callable[..., Any], hint: Any, args: dict[str, Any], as_is: bool
    ) -> Any:
        """Make the call, and record the reply in the exchange."""
        request = exchange.request
        own = {name: self._convert_argument(exchange, name, value) for name, value in args.items()}
        result = self._run(exchange, function, own)
        self._detect_modified_arguments(request, own)
        try:
            if family := request.family if request.name == "new" else result_protocol(hint):
                _require_operations(request.op, family, result, function)
                self.objects[request.id] = result
                # The judge computes with the sizes, so they are converted to Python integers, which do not overflow.
                self.configs[request.id] = {
                    name: int(size) if isinstance(size, np.integer) else size for name, size in args.items()
                }
                exchange.reply = CallReply(ObjectReference(request.id))
                return ObjectProxy(self, family, request.id)
            if as_is and getattr(result, "nbytes", 0) > MAX_RECORDED_BYTES:
                exchange.reply = CallReply(ArraySummary.from_array(result))
                return result
            exchange.reply = CallReply(to_plain_data(self.implementation, result, hint, request.op))
            record_chosen_value(exchange, self._chosen_values)
        except ClauseViolation as malformed:
            exchange.reply = CallReply(MalformedResult(malformed.got))
            raise
        return result if as_is else exchange.reply.ok

    def copy_for_trace(self, array: NDArray) -> Any:
        """A copy of the array for the call trace, or its Summary if it is too large."""
        if array.nbytes > MAX_RECORDED_BYTES or (self._recorded_bytes > MAX_RECORDED_TOTAL and array.size > MAX_ARRAY_VALUES):
            return ArraySummary.from_array(array)
        self._recorded_bytes += array.nbytes
        return array.copy()

    def _find_function(self, request: CallRequest) -> tuple[Callable[..., Any], Any]:
        """The function to call, and the annotation of its result. Raises NotOffered."""
        family, name = request.family, request.name
        if name == "new":
            return self.factory(family), None
        assert request.on is not None
        held, operation = self.objects[request.on], operations(family)[name]
        if not hasattr(type(held), name) and not hasattr(held, name):
            raise OperationDeclined(request.op + _similar_method(held, name, family))
        if operation.attribute:
            return (lambda: getattr(held, name)), operation.result
        try:
            method = getattr(held, name)
        except Exception:  # a property that raises: its error is the error of the call, so raise it in the call
            return (lambda *args, **named: getattr(held, name)), operation.result
        if not callable(method):
            raise OperationDeclined(request.op)  # an unrelated attribute of the same name
        return method, operation.result

    def _run(self, exchange: Exchange, function: Callable[..., Any], args: dict[str, Any]) -> Any:
        given = exchange.request.positional_names
        positional = [args[name] for name in given]
        named = {name: value for name, value in args.items() if name not in given} if len(given) < len(args) else {}
        try:
            return function(*positional, **named)
        except (KeyboardInterrupt, TimedOut, CallTimeout):
            raise
        except BaseException as error:
            said = to_call_error(error)
            if "NotOffered" in error_kinds(error):
                raise (NotOffered if exchange.request.name == "new" else OperationDeclined)(said.message) from error
            if not said.where:  # no line of the implementation ran: its signature does not accept the arguments
                _decline_optional(exchange.request, function, args)
                said = replace(said, where=defined_at(function))
            exchange.reply = CallReply(error=said)
            if isinstance(error, Exception):
                raise
            raise ClauseViolation(exchange.request.op, "a result or an error", f"{said.kind}: {said.message}") from None

    def _detect_modified_arguments(self, request: CallRequest, own: dict[str, Any]) -> None:
        """Set `changed` if the call modified an array argument. Callers of `make` decide whether to report it (LAW-16)."""
        for name, before in request.args.items():
            after = (
                _to_numpy_or_none(self, own[name]) if isinstance(before, np.ndarray) and name not in WRITTEN_IN_PLACE else None
            )
            if after is not None and not same_bits(before, after):
                if after.dtype != before.dtype:
                    with np.errstate(over="ignore"):
                        before = before.astype(after.dtype)
                if after.dtype.name == "bfloat16":  # NumPy cannot compare NaNs of this dtype
                    before, after = before.astype(np.float32), after.astype(np.float32)
                if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                    self.modified_argument = ClauseViolation(
                        f"the array passed to {request.op} as {name}", "unchanged", "changed", clause="LAW-16"
                    )

    def _convert_argument(self, exchange: Exchange, name: str, argument: Any) -> Any:
        if isinstance(argument, ObjectProxy):
            return self.objects[argument.id]
        if isinstance(argument, ObjectReference):
            return self.objects[argument.id]
        if isinstance(argument, OwnArray):
            return argument.array
        if not isinstance(argument, np.ndarray):
            return argument
        try:
            return self.implementation.asarray(argument) if name in FORMAT_ARRAYS else self.to_own_array(argument).array
        except Exception as error:
            said = to_call_error(error)
            if "NotOffered" in error_kinds(error):
                raise NotOffered(said.message) from error
            exchange.reply = CallReply(error=said)
            what, got = f"an array with the values {format_value(argument)}", f"{said.kind}: {said.message}"
            raise ClauseViolation("asarray", what, got, where=said.where) from error


def _similar_method(held: Any, name: str, family: str) -> str:
    """A note about a method with a similar name that is no operation of the family, or "": a misspelled operation."""
    others = [each for each in dir(type(held)) if not each.startswith("_") and each not in operations(family)]
    similar = get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (the object has {similar[0]})" if similar else ""


def _decline_optional(request: CallRequest, function: Callable[..., Any], args: dict[str, Any]) -> None:
    """Raise OperationDeclined if a method lacks an optional argument of the call: it does not support this argument."""
    optional = () if request.name == "new" else operations(request.family)[request.name].optional
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a method in C without a signature
        return
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values()):
        return
    if missing := [name for name in optional if name in args and name not in parameters]:
        raise OperationDeclined(f"{request.op} with the argument {missing[0]}")


def _require_operations(op: str, family: str, made: Any, factory: Callable[..., Any]) -> None:
    """Raise ClauseViolation if a factory returned an object without any operation of the family, such as None.

    Without this test all of its operations would count as not offered, and the wrong factory would not fail.
    """
    names = list(operations(family))
    if not any(hasattr(type(made), name) or hasattr(made, name) for name in names):
        expected = f"an object with operations of {family}: {', '.join(names[:4])}{', ...' if names[4:] else ''}"
        raise ClauseViolation(op, expected, short_repr(made), where=defined_at(factory))


def _record_argument(subject: CallRecorder, argument: Any) -> Any:
    """An argument as it is recorded: arrays are copied, objects are replaced by their id."""
    if isinstance(argument, ObjectProxy):
        return ObjectReference(argument.id)
    if isinstance(argument, OwnArray):
        argument = _to_numpy_or_none(subject, argument.array)
    if isinstance(argument, np.ndarray):
        return subject.copy_for_trace(argument)
    return list(argument) if isinstance(argument, range) else argument


def _to_numpy_or_none(subject: CallRecorder, array: Any) -> Any:
    """An array of the implementation as a NumPy array, or None if `to_numpy` does not support it."""
    try:
        return np.asarray(subject.implementation.to_numpy(array))
    except Exception:
        return None
