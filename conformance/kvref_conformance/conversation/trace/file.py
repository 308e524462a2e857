"""The trace format, version 1: chapter kvref/spec/trace.md, schema kvref/spec/trace.schema.json.

A header, then two lines an exchange: the request, and the reply it must get; where they part, also what was got instead.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import kvref
from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.exchange import Exchange, Request, needs, summarised
from kvref_conformance.conversation.operations import operations, protocols
from kvref_conformance.conversation.trace.wire import NotWire, from_wire, reply_to_wire, to_wire
from kvref_conformance.interface import Implementation
from kvref_conformance.oracle.witness import Unknown, Witness
from kvref_conformance.outcome import Broken
from kvref_conformance.schemas import mismatch

VERSION = 1
LARGEST = 2**24  # bytes of arrays in a trace; a larger one is written without them, and its replay runs the check again
SCHEMA = ("kvref.spec", "trace.schema.json")


class TraceError(Exception):
    """A file that is no trace: says the file, the line and what is wrong."""


@dataclass(frozen=True)
class Header:
    """clause and check: what it is about. judge: "model", whose word each reply is, or "check", which has to be run again."""

    clause: str
    check: str
    judge: str
    implementation: dict[str, str]
    seed: int = 0
    failed: dict[str, str] | None = None  # what, expected, got; cause, where it is known

    def line(self) -> str:
        return json.dumps({"trace": VERSION, "spec": kvref.__version__, **vars(self)})


@dataclass(frozen=True)
class Trace:
    header: Header
    requests: list[Request]
    replies: list[dict[str, Any]]  # as written
    lines: list[int]  # of each reply, counted from 1


def who(implementation: Implementation, load: str) -> dict[str, str]:
    """load: the name by which `kvref replay` finds it again."""
    return {name: str(getattr(implementation, name)) for name in ("name", "version", "language", "level")} | {"load": load}


def written(header: Header, witness: Witness, conversation: Iterable[Exchange]) -> list[str]:
    """The lines of a trace. A model's trace has the replies as they must be, by a new witness; another has those that came."""
    lines = [header.line()]
    for exchange in conversation:
        request, came = exchange.request, reply_to_wire(exchange.reply)
        lines.append(json.dumps(_request_to_wire(request)))
        reply = {"id": request.id, **came}
        if header.judge == "model":
            reply = {"id": request.id, **_judged(witness, exchange, came)}
        lines.append(json.dumps(reply))
    if header.failed and header.judge == "check":
        lines[-1] = json.dumps({**json.loads(lines[-1]), "failed": header.failed})
    return lines


def _judged(witness: Witness, exchange: Exchange, came: dict[str, Any]) -> dict[str, Any]:
    expected = witness.expect(exchange.request)
    must = {name: to_wire(value) for name, value in expected.wire().items()} | {"clause": expected.clause}
    try:
        witness.judge(exchange, expected)
    except Broken:
        return {**must, "got": came}
    either = "error" in must and "any" in must
    if "ok" in came and ("chosen" in must or either or exchange.request.name in ("new", "acquire")):
        must |= came  # what this implementation chose
    return must


def _request_to_wire(request: Request) -> dict[str, Any]:
    on = {} if request.on is None else {"on": request.on}
    return {"id": request.id, "op": request.op, **on, "args": to_wire(request.args)}


def too_large(conversation: Sequence[Exchange]) -> bool:
    return bytes_of_arrays(conversation) > LARGEST


def bytes_of_arrays(conversation: Sequence[Exchange]) -> int:
    return sum(array.nbytes for exchange in conversation for array in _arrays(exchange))


def _arrays(exchange: Exchange) -> Iterator[NDArray]:
    ok = exchange.reply.ok if exchange.reply else None
    parts = [*exchange.request.args.values(), *(ok if isinstance(ok, tuple) else (ok,))]
    yield from (part for part in parts if isinstance(part, np.ndarray))


def without_arrays(conversation: Iterable[Exchange]) -> Iterator[Exchange]:
    """The same exchanges with what stands for their larger arrays."""
    for exchange in conversation:
        request, reply = exchange.request, exchange.reply
        args = {name: summarised(value) for name, value in request.args.items()}
        yield replace(exchange, request=replace(request, args=args), reply=reply and replace(reply, ok=summarised(reply.ok)))


def judged_by_model(conversation: Sequence[Exchange], witness: Witness) -> bool:
    """Whether a new witness's models speak for every request, and find every reply right."""
    for exchange in conversation:
        try:
            expected = witness.expect(exchange.request)
            witness.judge(exchange, expected)
        except (Unknown, Broken):
            return False
    return True


def read(path: Path) -> Trace:
    """Raises TraceError, or OSError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a trace, not even text ({error.reason})") from None
    return parsed(path, lines)


def parsed(path: Path, lines: list[str]) -> Trace:
    """The lines of the file at `path`. Raises TraceError."""
    messages = [_message(path, number, line) for number, line in enumerate(lines, 1)]
    if not messages or "trace" not in messages[0]:
        raise TraceError(f'{path}:1: expected a header, {{"trace": {VERSION}, ...}}, got {lines[0][:60] if lines else "nothing"}')
    fields = {name: value for name, value in messages[0].items() if name in Header.__dataclass_fields__}
    requests, replies, numbers = list[Request](), list[dict[str, Any]](), list[int]()
    for number in range(1, len(messages), 2):
        request = _request(path, number + 1, messages[number])
        unknown = needs(request) - {earlier.id for earlier in requests}
        if unknown:
            raise TraceError(f"{path}:{number + 1}: no earlier request has the id {min(unknown)}")
        reply = messages[number + 1] if number + 1 < len(messages) else {}
        if reply.get("id") != request.id:
            raise TraceError(f"{path}:{number + 2}: expected the reply to request {request.id}, got {lines[number + 1 :][:1]}")
        requests.append(request)
        replies.append(reply)
        numbers.append(number + 2)
    return Trace(Header(**fields), requests, replies, numbers)


def _message(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of ten thousand digits, brackets without end
        raise TraceError(f"{path}:{number}: not JSON that can be read: {error}") from None
    if not isinstance(message, dict):
        raise TraceError(f"{path}:{number}: expected an object, got {line[:60]}")
    if message.get("trace") not in (None, VERSION):
        raise TraceError(f"{path}:{number}: a trace of version {message['trace']!r}; this kvref reads version {VERSION}")
    part = "header" if "trace" in message else "request" if "op" in message else "reply"
    if wrong := mismatch(message, *SCHEMA, part):
        raise TraceError(f"{path}:{number}: {wrong}")
    return message


def _request(path: Path, number: int, message: dict[str, Any]) -> Request:
    if "op" not in message:
        raise TraceError(f"{path}:{number}: expected a request, with an op, got the fields {', '.join(message)}")
    family, _, name = message["op"].partition(".")
    if family not in protocols() or (name != "new" and name not in operations(family)):
        raise TraceError(f"{path}:{number}: no operation {message['op']!r}")
    try:
        args = {name: from_wire(value) for name, value in message["args"].items()}
    except NotWire as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    return Request(message["id"], message["op"], message.get("on"), args)
