"""The protocol's operations as tables and as a JSON Schema, read off the typed interface: `python -m kvref_conformance.protocol`.

It rewrites the tables of kvref/spec/protocol.md and the whole of kvref/spec/protocol.schema.json; a test holds them to it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import kvref
from kvref.array import Array
from kvref.formats import FORMATS
from kvref_conformance.drivers.stdio import PROTOCOL
from kvref_conformance.interface import FAMILIES, Buffers, BufferStats, HeldBuffer, PooledStats, TieredStats
from kvref_conformance.operations import PROTOCOLS, Operation, factory, operations
from kvref_conformance.schemas import schema

SPEC = Path(kvref.__file__).parent / "spec"
BEGIN, END = "<!-- operations: written by python -m kvref_conformance.protocol -->", "<!-- end of operations -->"
CHAPTERS = {"elements": "formats", "rows": "formats", "buffer": "buffers"}  # of the others a family's name is its chapter's
STATS = (BufferStats, PooledStats, TieredStats)

_REPLY = {"id": "id", "ok": "value", "error": "error"}
_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
_LAYER = "SequenceNotFound LayerOutOfRange"
# The errors that each operation may have to answer with; what a family's `new` has to refuse is always a ConfigError.
ERRORS = {
    "elements.encode": "ShapeMismatch DtypeMismatch",
    "rows.quantize": _TOKENS,
    "kernels.scatter": "SlotOutOfRange ShapeMismatch DtypeMismatch",
    "kernels.gather": "SlotOutOfRange ShapeMismatch DtypeMismatch",
    "attention.attention": "ShapeMismatch DtypeMismatch",
    "contiguous.append": f"{_TOKENS} CapacityExceeded",
    "contiguous.append_fused": f"{_TOKENS} CapacityExceeded",
    "contiguous.advance": "CapacityExceeded PositionOutOfRange",
    "blocks.allocate": "OutOfBlocks",
    "blocks.allocate_many": "OutOfBlocks PositionOutOfRange",
    "blocks.free": "BlockNotAllocated",
    "paged.drop": "SequenceNotFound",
    "paged.ensure_capacity": "SequenceNotFound PositionOutOfRange OutOfBlocks",
    "paged.write": f"{_LAYER} PositionOutOfRange {_TOKENS} OutOfBlocks",
    "paged.append": f"{_LAYER} {_TOKENS} OutOfBlocks",
    "paged.append_step": f"SequenceNotFound {_TOKENS} OutOfBlocks",
    "paged.read": f"{_LAYER} PositionOutOfRange",
    "paged.gather_batch": _LAYER,
    "paged.lengths": _LAYER,
    "paged.block_tables": _LAYER,
    "paged.gather": _LAYER,
    "paged.length": _LAYER,
    "paged.block_table": _LAYER,
    "paged.slot_mapping": f"{_LAYER} PositionOutOfRange",
    "paged.attend": f"{_LAYER} ShapeMismatch DtypeMismatch",
    "quantized.append": f"LayerOutOfRange {_TOKENS} CapacityExceeded",
    "quantized.append_step": f"{_TOKENS} CapacityExceeded",
    "quantized.read_head": "LayerOutOfRange PositionOutOfRange HeadOutOfRange",
    "quantized.read_token": "LayerOutOfRange PositionOutOfRange",
    "quantized.read_tokens": "LayerOutOfRange PositionOutOfRange",
    "quantized.length": "LayerOutOfRange",
    "quantized.attend": "LayerOutOfRange ShapeMismatch DtypeMismatch",
    "tiered.append": _TOKENS,
    "tiered.tier_of": "PositionOutOfRange",
    "tiered.update_policy": "ConfigError",
    "tiered.attend": "ShapeMismatch DtypeMismatch",
    "buffers.acquire": "BufferTooLarge PositionOutOfRange",
    "buffers.prewarm": "ConfigError PositionOutOfRange",
    "buffer.address": "BufferReleased",
    "buffer.extend": "ShapeMismatch DtypeMismatch CapacityExceeded BufferReleased",
    "buffer.values": "BufferReleased",
    "buffer.clear": "BufferReleased",
    "pooled.append": f"{_TOKENS} BufferTooLarge",
}


def every_operation() -> Iterator[tuple[str, Operation]]:
    """By the name that it has in a request, in the order of the families."""
    for family in PROTOCOLS:
        if family in FAMILIES:
            yield f"{family}.new", factory(family)
        for name, operation in operations(family).items():
            yield f"{family}.{name}", operation


def errors(op: str) -> list[str]:
    """The kinds it may have to answer with."""
    arguments = factory(op.partition(".")[0]).arguments if op.endswith(".new") else {}
    return (ERRORS.get(op) or ("ConfigError" if arguments else "")).split()


def tables() -> str:
    """A table a family, in Markdown."""
    lines = []
    for family in PROTOCOLS:
        about = " ".join((PROTOCOLS[family].__doc__ or "").split())
        chapter = CHAPTERS.get(family, family)
        lines += ["", f"### {family}", "", f"What it means: [{chapter}.md]({chapter}.md). {about}".rstrip(), ""]
        lines += ["| operation | arguments | reply | errors |", "|---|---|---|---|"]
        for op, operation in every_operation():
            if op.partition(".")[0] == family:
                arguments = ", ".join(f"`{name}` {_words(hint)}" for name, hint in operation.arguments.items())
                arguments = "any of those of `new`" if op == "tiered.update_policy" else arguments
                reply = "an object" if op.endswith(".new") else _words(operation.says or operation.reply)
                lines.append(f"| `{op}` | {arguments or '-'} | {reply} | {', '.join(errors(op)) or '-'} |")
    return "\n".join([BEGIN, *lines, "", END])


def _words(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return f"array {get_args(hint)[1]}"
    if get_origin(hint) is tuple:
        parts = [_words(part) for part in get_args(hint)]
        return "list of two: " + parts[0] if parts == parts[:1] * 2 else "list of " + ", ".join(parts)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(part) for part in get_args(hint))
    if hint in STATS:
        return "an object with " + ", ".join(f"`{name}`" for name in get_type_hints(hint))
    plain = {
        int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null", Array: "array",
        HeldBuffer: "an object (`buffer`)", Buffers: "an object (`buffers`)",
    }  # fmt: skip
    return plain.get(hint) or "integers"


def document() -> dict[str, Any]:
    """The JSON Schema of a line either way, with one definition an operation for its arguments and its result."""
    shared = schema("kvref.spec", "trace.schema.json")["$defs"]
    hello = {
        "type": "object",
        "required": ["name", "version", "language", "level", "formats", "families"],
        "properties": {
            **{name: {"type": "string"} for name in ("name", "version", "language")},
            "level": {"enum": ["exact", "tolerant"]},
            "formats": {"type": "array", "items": {"enum": list(FORMATS)}},
            "families": {"type": "array", "items": {"enum": list(FAMILIES)}},
        },
    }
    asked = {"hello": _request("hello", {"protocol": {"const": PROTOCOL}}, on=False), "bye": _request("bye", {}, on=False)}
    asked |= {op: _asked(op, operation) for op, operation in every_operation()}
    given = {"hello": hello, "bye": {"type": "null"}}
    for op, operation in every_operation():
        made = op.endswith(".new")
        given[op] = {"$ref": "#/$defs/handle"} if made else _type(operation.says or operation.reply)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://kvref.dev/protocol/{PROTOCOL}",
        "title": f"kvref protocol, version {PROTOCOL}",
        "description": "A line over the pipe: a request of the judge's, or a reply of the program's. Each operation has "
        "request:OP, with right arguments (the judge sends wrong ones too), and result:OP, what `ok` has to be. See protocol.md.",
        "oneOf": [{"$ref": "#/$defs/request"}, {"$ref": "#/$defs/reply"}],
        "$defs": {
            "request": {"oneOf": [{"$ref": f"#/$defs/request:{op}"} for op in asked]},
            "reply": {
                "type": "object",
                "required": ["id"],
                "properties": {name: {"$ref": f"#/$defs/{kind}"} for name, kind in _REPLY.items()},
                "oneOf": [{"required": ["ok"]}, {"required": ["error"]}],
                "additionalProperties": False,
            },
            "error": {
                "type": "object",
                "required": ["kind"],
                "properties": {"kind": {"type": "string"}, "message": {"type": "string"}},
            },
            "id": {"type": "integer", "minimum": 0},
            "handle": {"type": "object", "required": ["handle"], "properties": {"handle": {"$ref": "#/$defs/id"}}},
            **{name: shared[name] for name in ("value", "array")},
            **{f"request:{op}": request for op, request in asked.items()},
            **{f"result:{op}": result for op, result in given.items()},
        },
    }


def _asked(op: str, operation: Operation) -> dict[str, Any]:
    optional = [name for name, hint in operation.arguments.items() if op.endswith(".new") and NoneType in get_args(hint)]
    arguments = {name: _type(hint) for name, hint in operation.arguments.items()}
    if op == "tiered.update_policy":
        arguments = {name: _type(hint) for name, hint in factory("tiered").arguments.items()}
        optional = list(arguments)
    return _request(op, arguments, on=not op.endswith(".new"), optional=optional)


def _request(op: str, arguments: dict[str, Any], on: bool, optional: list[str] | None = None) -> dict[str, Any]:
    required = [name for name in arguments if name not in (optional or [])]
    args = {"type": "object", "required": required, "properties": arguments, "additionalProperties": False}
    fields = {"id": {"$ref": "#/$defs/id"}, "op": {"const": op}} | ({"on": {"$ref": "#/$defs/id"}} if on else {}) | {"args": args}
    return {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}


def _type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Annotated:
        return {"$ref": "#/$defs/array"}
    if get_origin(hint) is tuple:
        parts = [_type(part) for part in get_args(hint)]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [_type(part) for part in get_args(hint)]}
    if hint in STATS:
        return {"type": "object", "properties": {name: _type(part) for name, part in get_type_hints(hint).items()}}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": {"type": "integer"}}
    if hint in (HeldBuffer, Buffers):
        return {"$ref": "#/$defs/handle"}
    plain: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
    if hint in plain:
        return {"type": plain[hint]}
    return {"$ref": "#/$defs/array"} if hint is Array else {"type": "array", "items": {"type": "integer"}}


def chapter(text: str) -> str:
    """The chapter with its tables as they are to be."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: tables(), text, flags=re.DOTALL)


def main() -> None:
    path = SPEC / "protocol.md"
    path.write_text(chapter(path.read_text(encoding="utf-8")), encoding="utf-8")
    (SPEC / "protocol.schema.json").write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
