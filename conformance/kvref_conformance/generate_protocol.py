"""The generated parts of the protocol's chapter and schema: `python -m kvref_conformance.generate_protocol` writes them.

It derives the tables of operations from the typed interface, and the lists of formats and limits from the code that defines
them. It rewrites the marked parts of kvref/spec/protocol.md and all of kvref/spec/protocol.schema.json; a test fails if they are
stale.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import kvref
from kvref.array import Array
from kvref.formats import FORMATS, GROUP_NAMES
from kvref.formats.group_scales import GROUPS
from kvref_conformance.calls.operation_table import Operation, factory_operation, operations, protocols, result_protocol
from kvref_conformance.drivers.json_client import PROTOCOL
from kvref_conformance.families import Family, all_families, names
from kvref_conformance.implementation_api import Statistics
from kvref_conformance.json_schema import read_schema
from kvref_conformance.limits import ARGUMENTS, SWITCHES, all_limits

SPEC = Path(kvref.__file__).parent / "spec"
BEGIN, END = "<!-- {}: written by python -m kvref_conformance.generate_protocol -->", "<!-- end of {} -->"
WIDTH = 140  # characters per line of a paragraph
_REPLY = {"id": "id", "ok": "value", "error": "error"}


def all_operations() -> Iterator[tuple[str, Operation]]:
    """(its name in a request, operation), in the order of the families."""
    for family in protocols():
        if family in names():
            yield f"{family}.new", factory_operation(family)
        for name, operation in operations(family).items():
            yield f"{family}.{name}", operation


def error_kinds(op: str) -> list[str]:
    """The kinds of errors that an operation replies with."""
    family, _, name = op.partition(".")
    if name == "new":
        return ["ConfigError"] if factory_operation(family).arguments else []
    owner = owner_of(family)
    kinds: dict[str, str] = owner.interface.ERRORS
    return kinds.get(name if owner.name == family else op, "").split()


def owner_of(family: str) -> Family:
    """The family of this name, or the family whose operations return objects of this name."""
    handing_out = (each for each in all_families().values() if family in getattr(each.interface, "HANDED_OUT", {}))
    return all_families().get(family) or next(handing_out)


def operation_tables() -> str:
    """One table per family, in Markdown."""
    lines = []
    for family in protocols():
        about = " ".join((protocols()[family].__doc__ or "").split())
        chapter = owner_of(family).chapter
        lines += ["", f"### {family}", "", _fill_paragraph(f"Clauses: [{chapter}.md]({chapter}.md). {about}"), ""]
        lines += ["| operation | arguments | reply | errors |", "|---|---|---|---|"]
        for op, operation in all_operations():
            if op.partition(".")[0] == family:
                named = (
                    f"`{name}` {describe_type(hint)}{_optional(operation, name)}" for name, hint in operation.arguments.items()
                )
                arguments = "any arguments of `new`" if op == "tiered.update_policy" else ", ".join(named)
                reply = "an object" if op.endswith(".new") else describe_type(operation.range_text or operation.result)
                lines.append(f"| `{op}` | {arguments or '-'} | {reply} | {', '.join(error_kinds(op)) or '-'} |")
    return "\n".join(lines[1:])


def _optional(operation: Operation, name: str) -> str:
    return " (optional)" if name in operation.optional else ""


def formats_text() -> str:
    """The names of all formats, in Markdown; those of FMT-GROUP as one pattern."""
    of_groups = {each.name for each in GROUPS}
    others = _listed([name for name in FORMATS if name not in of_groups])
    return _fill_paragraph(f"The formats are {others}, and `{GROUP_NAMES}` in all combinations.")


def _fill_paragraph(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def limits_text() -> str:
    """The names of all limits, in Markdown: the sizes and formats of the families, and ARGUMENTS."""
    every = [family.small for family in all_families().values()]
    dtypes = sorted({name for small in every for name, value in small.items() if isinstance(value, str)})
    sizes = sorted(all_limits() - set(ARGUMENTS) - set(dtypes))
    rows = [(_listed(sizes), "sizes that objects are created with", "numbers, or a range")]
    rows += [(_listed(dtypes), "formats that objects are created with; `dtype` also of the arrays in requests", "names")]
    rows += [(f"`{name}`", about, "boolean" if name in SWITCHES else "numbers, or a range") for name, about in ARGUMENTS.items()]
    rows += [("a family", "limits of this family, which take precedence", "object")]
    return "\n".join(["| name | limits | form |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _is_statistics(hint: Any) -> bool:
    return Statistics in getattr(hint, "__mro__", ())


def describe_type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return f"array {get_args(hint)[1]}"
    if get_origin(hint) is tuple:
        parts = [describe_type(part) for part in get_args(hint)]
        return "list of two: " + parts[0] if parts == parts[:1] * 2 else f"list of {len(parts)}: " + "; ".join(parts)
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{word}"`' for word in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(part) for part in get_args(hint))
    if _is_statistics(hint):
        return "an object with " + ", ".join(f"`{name}`" for name in get_type_hints(hint))
    plain = {
        int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null", Array: "array",
    }  # fmt: skip
    if items := [part for part in get_args(hint) if get_origin(part) is tuple]:
        return f"list, each item a {describe_type(items[0])}"
    made = result_protocol(hint)
    several = "numbers" if float in get_args(hint) else "integers"
    return f"an object (`{made}`)" if made else plain.get(hint) or several


def json_schema_document() -> dict[str, Any]:
    """The JSON Schema of a line in either direction, with a definition per operation for its arguments and for its result."""
    shared = read_schema("kvref.spec", "trace.schema.json")["$defs"]
    hello = {
        "type": "object",
        "required": ["name", "version", "language", "level", "formats", "families"],
        "properties": {
            **{name: {"type": "string"} for name in ("name", "version", "language")},
            "level": {"enum": ["exact", "tolerant"]},
            "formats": {"type": "array", "items": {"enum": list(FORMATS)}},
            "families": {"type": "array", "items": {"enum": list(names())}},
            "limits": {"type": "object", "propertyNames": {"enum": sorted({*all_limits(), *names()})}},
        },
    }
    asked = {
        "hello": _schema_of_request("hello", {"protocol": {"const": PROTOCOL}}, on=False),
        "bye": _schema_of_request("bye", {}, on=False),
    }
    asked |= {op: _request_schema(op, operation) for op, operation in all_operations()}
    given = {"hello": hello, "bye": {"type": "null"}}
    for op, operation in all_operations():
        made = op.endswith(".new")
        given[op] = {"$ref": "#/$defs/handle"} if made else _schema_of_type(operation.range_text or operation.result)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://kvref.dev/protocol/{PROTOCOL}",
        "title": f"kvref protocol, version {PROTOCOL}",
        "description": "One line over the pipe: a request of the judge or a reply of the program. For each operation, request:OP "
        "defines valid arguments (the judge also sends invalid ones), and result:OP defines `ok`. See protocol.md.",
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


def _request_schema(op: str, operation: Operation) -> dict[str, Any]:
    optional = [name for name, hint in operation.arguments.items() if op.endswith(".new") and NoneType in get_args(hint)]
    optional += operation.optional
    arguments = {name: _schema_of_type(hint) for name, hint in operation.arguments.items()}
    if op == "tiered.update_policy":
        arguments = {name: _schema_of_type(hint) for name, hint in factory_operation("tiered").arguments.items()}
        optional = list(arguments)
    return _schema_of_request(op, arguments, on=not op.endswith(".new"), optional=optional)


def _schema_of_request(op: str, arguments: dict[str, Any], on: bool, optional: list[str] | None = None) -> dict[str, Any]:
    required = [name for name in arguments if name not in (optional or [])]
    args = {"type": "object", "required": required, "properties": arguments, "additionalProperties": False}
    fields = {"id": {"$ref": "#/$defs/id"}, "op": {"const": op}} | ({"on": {"$ref": "#/$defs/id"}} if on else {}) | {"args": args}
    return {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}


def _schema_of_type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Annotated:
        return {"$ref": "#/$defs/array"}
    if get_origin(hint) is tuple:
        parts = [_schema_of_type(part) for part in get_args(hint)]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [_schema_of_type(part) for part in get_args(hint)]}
    if _is_statistics(hint):
        return {"type": "object", "properties": {name: _schema_of_type(part) for name, part in get_type_hints(hint).items()}}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": {"type": "integer"}}
    if result_protocol(hint):
        return {"$ref": "#/$defs/handle"}
    plain: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
    if hint in plain:
        return {"type": plain[hint]}
    if items := [part for part in get_args(hint) if get_origin(part) is tuple]:
        return {"type": "array", "items": _schema_of_type(items[0])}
    item = "number" if float in get_args(hint) else "integer"
    return {"$ref": "#/$defs/array"} if hint is Array else {"type": "array", "items": {"type": item}}


def updated_chapter(text: str) -> str:
    """The chapter with its generated parts rewritten. Raises ValueError if the markers of a part are missing."""
    for name, part in PARTS.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text or end not in text:
            raise ValueError(f"protocol.md: expected {begin} and {end}")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{part()}\n\n{end}{after}"
    return text


PARTS = {"formats": formats_text, "limits": limits_text, "operations": operation_tables}


def main() -> None:
    path = SPEC / "protocol.md"
    path.write_text(updated_chapter(path.read_text(encoding="utf-8")), encoding="utf-8")
    (SPEC / "protocol.schema.json").write_text(json.dumps(json_schema_document(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
