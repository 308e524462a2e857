"""An implementation in another process and any language, spoken to over a pipe: chapter kvref/spec/protocol.md.

To a `Subject` it is an implementation like any other: its arrays are NumPy's, its objects have the methods of the interface, and
each call of one is a request and its reply.
"""

import json
from collections.abc import Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvref import errors
from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.drivers.guard import ONCE_HUNG, TimedOut, time_limit
from kvref_conformance.conversation.drivers.pipe import LONGEST, Lost, Pipe, shown
from kvref_conformance.conversation.exchange import KNOWN_KINDS, On
from kvref_conformance.conversation.operations import made_by, operations
from kvref_conformance.conversation.trace.wire import NotWire, from_wire, to_wire
from kvref_conformance.families import names
from kvref_conformance.interface import ExternalImplementation, Level
from kvref_conformance.limits import Limits, LimitsError
from kvref_conformance.outcome import Died, NotOffered

PROTOCOL = 1
STARTING = 30.0  # seconds until it has said hello; once it took longer, ONCE_HUNG


class HelloError(Exception):
    """The program did not say who it is: says what was expected and what came."""


class OverStdio(ExternalImplementation):
    """Says hello at once. Raises FileNotFoundError, HelloError."""

    formats: tuple[str, ...]
    level: Level

    def __init__(self, command: Sequence[str], folder: Path, show_stderr: bool = False) -> None:
        self._pipe = Pipe(command, folder, show_stderr)
        self._broken: Died | None = None  # why there is no conversation
        self._patience = STARTING
        said = self.begin()
        if self._broken:
            raise HelloError(f"hello: expected {self._broken.expected}, got {self._broken.got}")
        told = _told(said)
        self.name, self.version, self.language, self.level = (told[name] for name in ("name", "version", "language", "level"))
        self.formats, self.limits = tuple(told["formats"]), told.get("limits")
        for family in told["families"]:
            setattr(self, family, partial(self._make, family))

    def begin(self) -> Any:
        """A new conversation: what was made before is forgotten. Gives what it says of itself."""
        self._ids, self._broken = count(), None
        try:
            with time_limit(self._patience):
                return self._ask("hello", None, {"protocol": PROTOCOL})[1]
        except TimedOut as late:
            self._broken = Died("hello", f"an answer within {self._patience:g} s", late.got)
            self._patience = ONCE_HUNG
        except Died as died:
            self._broken = died
        except Exception as refused:
            self._broken = Died("hello", '"ok"', f"{type(refused).__name__}: {refused}")

    def close(self, politely: bool = True) -> int | None:
        """End the program, with a bye or without: its exit code, or None where it had to be killed or did not run."""
        return self._pipe.end(_line(next(self._ids), "bye", None, {}) if politely else b"")

    def asarray(self, values: Any) -> NDArray:
        return np.array(values)

    def to_numpy(self, array: NDArray) -> NDArray:
        return array

    def call(self, op: str, on: int | None, args: dict[str, Any]) -> tuple[int, Any]:
        """The id of the request, and the result. Raises the error of the reply, NotOffered, or Died."""
        if self._broken or not self._pipe.runs:
            raise self._broken or Died(op, "an answer", "none: the process is gone")
        return self._ask(op, on, args)

    def _make(self, family: str, **config: Any) -> "Remote":
        id, made = self.call(f"{family}.new", None, config)
        if made != On(id):
            raise Died(f"{family}.new", f'{{"handle": {id}}}', repr(made))
        return _class_of(family)(self, id)

    def _ask(self, op: str, on: int | None, args: dict[str, Any]) -> tuple[int, Any]:
        id = next(self._ids)
        line = _line(id, op, on, args)
        if len(line) > LONGEST:
            raise NotOffered(f"arrays of more than {LONGEST >> 20} MiB over a pipe")
        try:
            came = self._pipe.ask(line)
        except Lost as lost:
            raise Died(op, "an answer", f"none: {lost}") from None
        try:
            reply = json.loads(came)
            result = from_wire(reply["ok"]) if _is_reply(reply, id) else None
        except (ValueError, RecursionError):
            raise self._garbled(op, "a line of JSON", shown(came)) from None
        except Garbled as garbled:
            raise self._garbled(op, *garbled.args) from None
        except NotWire as wrong:
            raise self._garbled(op, "values as JSON", str(wrong)) from None
        if "error" in reply:
            raise _error(reply["error"]["kind"], str(reply["error"].get("message", "")))
        return id, result

    def _garbled(self, op: str, expected: str, got: str) -> Died:
        self._pipe.kill()  # who knows what its next line answers
        return Died(op, expected, got)


class Remote:
    """An object of the program's: a method or a property for each operation of its family."""

    family: str

    def __init__(self, program: OverStdio, id: int) -> None:
        self._program, self.id = program, id

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        operation = operations(self.family)[name]
        everything = dict(zip(operation.parameters, args, strict=False)) | named
        id, result = self._program.call(f"{self.family}.{name}", self.id, everything)
        if (made := made_by(operation.reply)) and result == On(id):
            return _class_of(made)(self._program, id)
        return result


@cache
def _class_of(family: str) -> type[Remote]:
    def member(name: str, attribute: bool) -> Any:
        if attribute:
            return property(lambda self: self._call(name))
        return lambda self, *args, **named: self._call(name, *args, **named)

    members = {name: member(name, operation.attribute) for name, operation in operations(family).items()}
    return type(family, (Remote,), {"family": family, **members})


def _line(id: int, op: str, on: int | None, args: dict[str, Any]) -> bytes:
    named = {name: to_wire(On(value.id) if isinstance(value, Remote) else value) for name, value in args.items()}
    request = {"id": id, "op": op, **({} if on is None else {"on": on}), "args": named}
    return json.dumps(request).encode() + b"\n"


class Garbled(Exception):
    """Not a reply of the protocol: what was expected, what came."""


def _is_reply(reply: Any, id: int) -> bool:
    """Whether it holds a result, and not an error. Raises Garbled where it is neither."""
    if not isinstance(reply, dict):
        raise Garbled("an object", shown(json.dumps(reply).encode()))
    if reply.get("id") != id or isinstance(reply["id"], bool):
        raise Garbled(f'"id": {id}, that of the request', f'"id": {json.dumps(reply["id"])}' if "id" in reply else "no id")
    if set(reply) - {"id"} not in ({"ok"}, {"error"}):
        raise Garbled('"ok" or "error" beside the id', ", ".join(sorted(set(reply) - {"id"})) or "nothing")
    error = reply.get("error", {"kind": ""})
    if not isinstance(error, dict) or not isinstance(error.get("kind"), str):
        raise Garbled('an error with a "kind", a string', shown(json.dumps(error).encode()))
    return "ok" in reply


def _error(kind: str, message: str) -> Exception:
    """An exception of a class of this name, which is what the judge goes by."""
    if kind == "NotOffered":
        return NotOffered(message or "declined")
    if kind in KNOWN_KINDS:
        found: Exception = getattr(errors, kind)(message)
        return found
    odd: Exception = type(kind, (Exception,), {})(message)
    return odd


def _told(said: Any) -> dict[str, Any]:
    """What a program says of itself. Raises HelloError."""
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
