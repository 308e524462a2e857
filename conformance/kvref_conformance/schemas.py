"""Documents held against the JSON Schemas that kvref publishes."""

import json
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

DEEPEST = 32  # lists and objects within each other: no document needs half as many


@cache
def schema(package: str, name: str) -> Any:
    return json.loads((files(package) / name).read_text(encoding="utf-8"))


def _part(package: str, name: str, part: str) -> Any:
    whole = schema(package, name)
    return {"$ref": f"#/$defs/{part}", "$defs": whole["$defs"]} if part else whole


@cache
def _quick(package: str, name: str, part: str) -> Any:
    import jsonschema_rs

    return jsonschema_rs.Draft202012Validator(_part(package, name, part))


def mismatch(document: Any, package: str, name: str, part: str = "") -> str:
    """What is wrong with a document and where in it; empty where it is as the schema says, or one of its $defs.

    Whether it is, jsonschema-rs says soonest; what is wrong, jsonschema, which knows the best of several errors.
    """
    if _too_deep(document):
        return "nested too deeply to be read"
    with suppress(ValueError):  # a key with half a surrogate pair, which is no text in Rust
        if _quick(package, name, part).is_valid(document):
            return ""
    import jsonschema  # slow to import, and rarely needed

    errors = jsonschema.Draft202012Validator(_part(package, name, part)).iter_errors(document)
    wrong = jsonschema.exceptions.best_match(errors)
    where = "".join(f"[{part!r}]" for part in wrong.absolute_path)[:200] if wrong else ""
    return f"{where}{' ' if where else ''}{wrong.message[:200]}" if wrong else ""


def _too_deep(document: Any) -> bool:
    """Before anything goes down into it by calls, of which an end of the stack ends the process."""
    layer = [document]
    for _ in range(DEEPEST):
        layer = [part for each in layer if isinstance(each, (dict, list)) for part in _parts(each)]
    return bool(layer)


def _parts(of: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return of.values() if isinstance(of, dict) else of
