"""The client of the protocol in kvref/spec/protocol.md: calls an implementation in another process, in any language, over a pipe.

For a `Subject` it is an implementation like any other. Its arrays are NumPy arrays, its objects have the methods of the
interface, and each method call sends a request and waits for the reply.
"""

import json
from collections.abc import Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvref import errors
from kvref_conformance.calls.messages import KNOWN_KINDS, ObjectReference
from kvref_conformance.calls.operation_table import operations, result_protocol
from kvref_conformance.drivers.resource_limits import TIMEOUT_AFTER_HANG, TimedOut, time_limit
from kvref_conformance.drivers.subprocess_pipe import MAX_LINE_BYTES, LineTooLong, PipeClosed, SubprocessPipe, quote_output
from kvref_conformance.exceptions import NotOffered, ProcessDeath
from kvref_conformance.families import names
from kvref_conformance.implementation_api import ExternalImplementation, Level, NDArray
from kvref_conformance.limits import Limits, LimitsError
from kvref_conformance.traces.json_codec import NotSerializable, PackageMissing, from_wire, to_wire

PROTOCOL = 1
TOO_LONG = f"arrays of more than {MAX_LINE_BYTES >> 20} MiB over a pipe"
START_TIMEOUT = 30.0  # seconds until the reply to "hello"; TIMEOUT_AFTER_HANG after it was late once


class HelloError(Exception):
    """The program's reply to "hello" is missing or malformed. The message has what was expected and what was received."""


class JsonClient(ExternalImplementation):
    """An implementation that runs as a child program. The constructor starts it and sends "hello".

    Raises FileNotFoundError or PermissionError if the program cannot be started, HelloError if its reply is wrong.
    """

    formats: tuple[str, ...]
    level: Level

    def __init__(self, command: Sequence[str], folder: Path, show_stderr: bool = False) -> None:
        self._pipe = SubprocessPipe(command, folder, show_stderr)
        self._broken: ProcessDeath | None = None  # why calls are impossible
        self._patience = START_TIMEOUT
        said = self.send_hello()
        if self._broken:
            raise HelloError(f"hello: expected {self._broken.expected}, got {self._broken.got}")
        told = _validate_hello(said)
        self.name, self.version, self.language, self.level = (told[name] for name in ("name", "version", "language", "level"))
        self.formats, self.limits = tuple(told["formats"]), told.get("limits")
        for family in told["families"]:
            setattr(self, family, partial(self._make, family))

    def send_hello(self) -> Any:
        """Send "hello", after which the program has no objects. Returns its reply, or None if it did not reply."""
        self._ids, self._broken = count(), None
        try:
            with time_limit(self._patience):
                return self._send_request("hello", None, {"protocol": PROTOCOL})[1]
        except TimedOut as late:
            self._broken = ProcessDeath("hello", f"a reply within {self._patience:g} s", late.got)
            self._patience = TIMEOUT_AFTER_HANG
        except ProcessDeath as died:
            self._broken = died
        except Exception as refused:
            self._broken = ProcessDeath("hello", '"ok"', f"{type(refused).__name__}: {refused}")

    def close(self, politely: bool = True) -> int | None:
        """End the program. politely: send "bye" first. Returns the exit code, or None if it did not run or was killed."""
        return self._pipe.end(_encode_request(next(self._ids), "bye", None, {}) if politely else b"")

    def asarray(self, values: Any) -> NDArray:
        return np.array(values)

    def to_numpy(self, array: NDArray) -> NDArray:
        return array

    def call(self, op: str, on: int | None, args: dict[str, Any]) -> tuple[int, Any]:
        """Send a request, and return its id and the result. Raises the error in the reply, NotOffered, or ProcessDeath."""
        if self._broken or not self._pipe.is_running:
            raise self._broken or ProcessDeath(op, "a reply", "none: the process has ended")
        return self._send_request(op, on, args)

    def _make(self, family: str, **config: Any) -> "RemoteObject":
        id, made = self.call(f"{family}.new", None, config)
        if made != ObjectReference(id):
            raise ProcessDeath(f"{family}.new", f'{{"handle": {id}}}', repr(made))
        return _class_of(family)(self, id)

    def _send_request(self, op: str, on: int | None, args: dict[str, Any]) -> tuple[int, Any]:
        id = next(self._ids)
        line = _encode_request(id, op, on, args)
        if len(line) > MAX_LINE_BYTES:
            raise NotOffered(TOO_LONG)
        try:
            came = self._pipe.ask(line)
        except LineTooLong:
            raise NotOffered(TOO_LONG) from None
        except PipeClosed as lost:
            raise ProcessDeath(op, "a reply", f"none: {lost}") from None
        try:
            reply = json.loads(came)
            result = from_wire(reply["ok"]) if _is_reply(reply, id) else None
        except (ValueError, RecursionError):
            raise self._malformed_reply(
                op,
                "a line of JSON",
                f"{quote_output(came)} (standard output carries the replies; anything else belongs on standard error)",
            ) from None
        except MalformedMessage as garbled:
            raise self._malformed_reply(op, *garbled.args) from None
        except PackageMissing as lacking:
            raise NotOffered(lacking) from None
        except NotSerializable as wrong:
            raise self._malformed_reply(op, "values as JSON", str(wrong)) from None
        if "error" in reply:
            raise _error(reply["error"]["kind"], str(reply["error"].get("message", "")))
        return id, result

    def _malformed_reply(self, op: str, expected: str, got: str) -> ProcessDeath:
        self._pipe.kill()  # later replies might no longer match their requests
        return ProcessDeath(op, expected, got)


class RemoteObject:
    """An object in the program. Subclasses have a method or property for each operation of the family."""

    family: str

    def __init__(self, program: JsonClient, id: int) -> None:
        self._program, self.id = program, id

    def settle(self) -> None:
        """Make freed blocks allocatable. Called only if the program declares the limit `settle`."""
        self._program.call(f"{self.family}.settle", self.id, {})

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        operation = operations(self.family)[name]
        everything = dict(zip(operation.parameters, args, strict=False)) | named
        id, result = self._program.call(f"{self.family}.{name}", self.id, everything)
        if (made := result_protocol(operation.result)) and result == ObjectReference(id):
            return _class_of(made)(self._program, id)
        return result


@cache
def _class_of(family: str) -> type[RemoteObject]:
    def member(name: str, attribute: bool) -> Any:
        if attribute:
            return property(lambda self: self._call(name))
        return lambda self, *args, **named: self._call(name, *args, **named)

    members = {name: member(name, operation.attribute) for name, operation in operations(family).items()}
    return type(family, (RemoteObject,), {"family": family, **members})


def _encode_request(id: int, op: str, on: int | None, args: dict[str, Any]) -> bytes:
    named = {
        name: to_wire(ObjectReference(value.id) if isinstance(value, RemoteObject) else value) for name, value in args.items()
    }
    request = {"id": id, "op": op, **({} if on is None else {"on": on}), "args": named}
    return json.dumps(request).encode() + b"\n"


class MalformedMessage(Exception):
    """A reply is malformed. args: what was expected, what was received."""


def _is_reply(reply: Any, id: int) -> bool:
    """Whether the reply is a result (True) or an error (False). Raises MalformedMessage if it is malformed."""
    if not isinstance(reply, dict):
        raise MalformedMessage("an object", quote_output(json.dumps(reply).encode()))
    if reply.get("id") != id or isinstance(reply["id"], bool):
        raise MalformedMessage(
            f'"id": {id}, the id of the request', f'"id": {json.dumps(reply["id"])}' if "id" in reply else "no id"
        )
    if set(reply) - {"id"} not in ({"ok"}, {"error"}):
        raise MalformedMessage('either "ok" or "error", besides the id', ", ".join(sorted(set(reply) - {"id"})) or "nothing")
    error = reply.get("error", {"kind": ""})
    if not isinstance(error, dict) or not isinstance(error.get("kind"), str):
        raise MalformedMessage('an error with a "kind", a string', quote_output(json.dumps(error).encode()))
    return "ok" in reply


def _error(kind: str, message: str) -> Exception:
    """An exception whose class has this name, because the judge identifies errors by name."""
    if kind == "NotOffered":
        return NotOffered(message or "declined")
    if kind in KNOWN_KINDS:
        found: Exception = getattr(errors, kind)(message)
        return found
    odd: Exception = type(kind, (Exception,), {})(message)
    return odd


def _validate_hello(said: Any) -> dict[str, Any]:
    """The validated reply to "hello". Raises HelloError."""
    told: dict[str, Any] = said if isinstance(said, dict) else {}
    for field in ("name", "version", "language", "level", "formats", "families"):
        several, value = field in ("formats", "families"), told.get(field)
        if not (isinstance(value, list) and all(isinstance(each, str) for each in value) if several else isinstance(value, str)):
            expected = "a list of strings" if several else "a string"
            raise HelloError(f"hello: {field}: expected {expected}, got {json.dumps(value)[:60] if field in told else 'nothing'}")
    try:
        Limits(told.get("limits"))
    except LimitsError as error:
        raise HelloError(f"hello: {error}") from None
    unknown = [family for family in told["families"] if family not in names()]
    if unknown:
        raise HelloError(f"hello: families: expected some of {', '.join(names())}, got {unknown[0]!r}")
    return told
