"""Documents held against the JSON Schemas that kvref publishes."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def schema(package: str, name: str) -> Any:
    return json.loads((files(package) / name).read_text(encoding="utf-8"))


@cache
def _validator(package: str, name: str, part: str) -> Any:
    import jsonschema  # slow to import, and rarely needed

    whole = schema(package, name)
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{part}", "$defs": whole["$defs"]} if part else whole)


def mismatch(document: Any, package: str, name: str, part: str = "") -> str:
    """What is wrong with a document and where in it; empty where it is as the schema says, or one of its $defs."""
    import jsonschema

    try:
        wrong = jsonschema.exceptions.best_match(_validator(package, name, part).iter_errors(document))
    except RecursionError:
        return "nested too deeply to be read"
    where = "".join(f"[{part!r}]" for part in wrong.absolute_path)[:200] if wrong else ""
    return f"{where}{' ' if where else ''}{wrong.message[:200]}" if wrong else ""
