"""The reader and writer of the trace format, version 1: chapter kvref/spec/trace.md, schema kvref/spec/trace.schema.json.

A trace is a header, then two lines per call: the request, and the correct reply. If the actual reply was wrong, the second line
has it too ("got").
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import kvref
from kvref_conformance.calls.messages import CallRequest, Exchange, referenced_ids, summarize_arrays
from kvref_conformance.calls.operation_table import operations, protocols
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import Implementation, NDArray
from kvref_conformance.json_schema import schema_mismatch
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.traces.json_codec import NotSerializable, from_wire, reply_to_wire, to_wire

VERSION = 1
MAX_ARRAY_BYTES = (
    2**24
)  # bytes of arrays in a trace; a larger trace is written without arrays, and its replay runs the check again
SCHEMA = ("kvref.spec", "trace.schema.json")


class TraceError(Exception):
    """A file is not a valid trace. The message names the file, the line and the problem."""


@dataclass(frozen=True)
class Header:
    """The first line of a trace.

    clause, check: the clause and the check that failed. judge: "model" if the model predicts each reply, so that a replay can
    judge it; "check" if a replay has to run the check again. implementation: see `who`. seed: the seed of the check.
    failed: what, expected and got; and cause, if known.
    """

    clause: str
    check: str
    judge: str
    implementation: dict[str, str]
    seed: int = 0
    failed: dict[str, str] | None = None

    def line(self) -> str:
        return json.dumps({"trace": VERSION, "spec": kvref.__version__, **vars(self)})


@dataclass(frozen=True)
class Trace:
    header: Header
    requests: list[CallRequest]
    replies: list[dict[str, Any]]  # the reply lines, unchanged
    lines: list[int]  # the line number of each reply, counted from 1


def describe_implementation(implementation: Implementation, load: str) -> dict[str, str]:
    """The description of an implementation in a header. load: the name by which `kvref replay` loads it."""
    return {name: str(getattr(implementation, name)) for name in ("name", "version", "language", "level")} | {"load": load}


def trace_lines(header: Header, models: ModelRunner, call_trace: Iterable[Exchange]) -> list[str]:
    """The lines of a trace.

    A trace with judge "model" contains the correct replies, predicted by `models`, which must be new. Any other trace contains
    the actual replies.
    """
    lines = [header.line()]
    for exchange in call_trace:
        request, came = exchange.request, reply_to_wire(exchange.reply)
        lines.append(json.dumps(_request_to_wire(request)))
        reply = {"id": request.id, **came}
        if header.judge == "model":
            reply = {"id": request.id, **_reply_line(models, exchange, came)}
        lines.append(json.dumps(reply))
    if header.failed and header.judge == "check":
        lines[-1] = json.dumps({**json.loads(lines[-1]), "failed": header.failed})
    return lines


def _reply_line(models: ModelRunner, exchange: Exchange, came: dict[str, Any]) -> dict[str, Any]:
    expected = models.expect(exchange.request)
    must = {name: to_wire(value) for name, value in expected.to_json().items()} | {"clause": expected.clause}
    try:
        models.judge(exchange, expected)
    except ClauseViolation:
        return {**must, "got": came}
    either = "error" in must and "any" in must
    if "ok" in came and ("chosen" in must or either or exchange.request.name in ("new", "acquire")):
        must |= came  # a value that the implementation may choose
    return must


def _request_to_wire(request: CallRequest) -> dict[str, Any]:
    on = {} if request.on is None else {"on": request.on}
    return {"id": request.id, "op": request.op, **on, "args": to_wire(request.args)}


def exceeds_array_limit(call_trace: Sequence[Exchange]) -> bool:
    return count_array_bytes(call_trace) > MAX_ARRAY_BYTES


def count_array_bytes(call_trace: Sequence[Exchange]) -> int:
    return sum(array.nbytes for exchange in call_trace for array in _arrays_of(exchange))


def _arrays_of(exchange: Exchange) -> Iterator[NDArray]:
    ok = exchange.reply.ok if exchange.reply else None
    parts = [*exchange.request.args.values(), *(ok if isinstance(ok, tuple) else (ok,))]
    yield from (part for part in parts if isinstance(part, np.ndarray))


def without_arrays(call_trace: Iterable[Exchange]) -> Iterator[Exchange]:
    """The same exchanges with their larger arrays replaced by a Summary."""
    for exchange in call_trace:
        request, reply = exchange.request, exchange.reply
        args = {name: summarize_arrays(value) for name, value in request.args.items()}
        yield replace(
            exchange, request=replace(request, args=args), reply=reply and replace(reply, ok=summarize_arrays(reply.ok))
        )


def judged_by_model(call_trace: Sequence[Exchange], models: ModelRunner) -> bool:
    """Whether the models cover every request, and every reply is correct. models: a new one."""
    for exchange in call_trace:
        try:
            expected = models.expect(exchange.request)
            models.judge(exchange, expected)
        except (UnknownObject, ClauseViolation):
            return False
    return True


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises TraceError or OSError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a trace: not a text file ({error.reason})") from None
    return parse_trace(path, lines)


def parse_trace(path: Path, lines: list[str]) -> Trace:
    """Parse the lines of the file at `path`. Raises TraceError."""
    messages = [_parse_message(path, number, line) for number, line in enumerate(lines, 1)]
    if not messages or "trace" not in messages[0]:
        raise TraceError(f'{path}:1: expected a header, {{"trace": {VERSION}, ...}}, got {lines[0][:60] if lines else "nothing"}')
    fields = {name: value for name, value in messages[0].items() if name in Header.__dataclass_fields__}
    requests, replies, numbers = list[CallRequest](), list[dict[str, Any]](), list[int]()
    for number in range(1, len(messages), 2):
        request = _parse_request(path, number + 1, messages[number])
        unknown = referenced_ids(request) - {earlier.id for earlier in requests}
        if unknown:
            raise TraceError(f"{path}:{number + 1}: no earlier request has the id {min(unknown)}")
        reply = messages[number + 1] if number + 1 < len(messages) else {}
        if reply.get("id") != request.id:
            raise TraceError(f"{path}:{number + 2}: expected the reply to request {request.id}, got {lines[number + 1 :][:1]}")
        requests.append(request)
        replies.append(reply)
        numbers.append(number + 2)
    return Trace(Header(**fields), requests, replies, numbers)


def _parse_message(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or brackets nested too deeply
        raise TraceError(f"{path}:{number}: not valid JSON: {error}") from None
    if not isinstance(message, dict):
        raise TraceError(f"{path}:{number}: expected an object, got {line[:60]}")
    if message.get("trace") not in (None, VERSION):
        raise TraceError(f"{path}:{number}: a trace of version {message['trace']!r}; this kvref reads version {VERSION}")
    part = "header" if "trace" in message else "request" if "op" in message else "reply"
    if wrong := schema_mismatch(message, *SCHEMA, part):
        raise TraceError(f"{path}:{number}: {wrong}")
    return message


def _parse_request(path: Path, number: int, message: dict[str, Any]) -> CallRequest:
    if "op" not in message:
        raise TraceError(f"{path}:{number}: expected a request, with an op, got the fields {', '.join(message)}")
    family, _, name = message["op"].partition(".")
    if family not in protocols() or (name != "new" and name not in operations(family)):
        raise TraceError(f"{path}:{number}: no operation {message['op']!r}")
    try:
        args = {name: from_wire(value) for name, value in message["args"].items()}
    except NotSerializable as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    return CallRequest(message["id"], message["op"], message.get("on"), args)
