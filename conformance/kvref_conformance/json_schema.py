"""Validation of documents with the JSON Schemas that kvref publishes."""

import json
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

MAX_DEPTH = 32  # maximum nesting of lists and objects; valid documents need less than half of it


@cache
def read_schema(package: str, name: str) -> Any:
    """Read the schema `name` of a package."""
    return json.loads((files(package) / name).read_text(encoding="utf-8"))


def _schema_part(package: str, name: str, part: str) -> Any:
    whole = read_schema(package, name)
    return {"$ref": f"#/$defs/{part}", "$defs": whole["$defs"]} if part else whole


@cache
def _fast_validator(package: str, name: str, part: str) -> Any:
    import jsonschema_rs

    return jsonschema_rs.Draft202012Validator(_schema_part(package, name, part))


def schema_mismatch(document: Any, package: str, name: str, part: str = "") -> str:
    """The error of a document and where it is, as text; "" if the document is valid.

    part: the name of a definition in $defs to use instead of the whole schema. jsonschema-rs tests validity, because it is fast;
    jsonschema finds the error, because it selects the most relevant of several.
    """
    if _too_deep(document):
        return "nested too deeply to be read"
    with suppress(ValueError):  # a key with a lone surrogate, which Rust does not accept as text
        if _fast_validator(package, name, part).is_valid(document):
            return ""
    import jsonschema  # slow to import, and rarely needed

    errors = jsonschema.Draft202012Validator(_schema_part(package, name, part)).iter_errors(document)
    wrong = jsonschema.exceptions.best_match(errors)
    where = "".join(f"[{part!r}]" for part in wrong.absolute_path)[:200] if wrong else ""
    return f"{where}{' ' if where else ''}{wrong.message[:200]}" if wrong else ""


def _too_deep(document: Any) -> bool:
    """Whether a document is nested too deeply. Tested without recursion, because a stack overflow would end the process."""
    layer = [document]
    for _ in range(MAX_DEPTH):
        layer = [part for each in layer if isinstance(each, (dict, list)) for part in _children(each)]
    return bool(layer)


def _children(of: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return of.values() if isinstance(of, dict) else of
