"""The machine-readable result of a run: results.schema.json, beside this file, says what is in it."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvref
from kvref_conformance.asked import Asked
from kvref_conformance.interface import FAMILIES
from kvref_conformance.report.text import Result
from kvref_conformance.schemas import mismatch

FORMAT = 1
SCHEMA = ("kvref_conformance.report", "results.schema.json")
OPTIONS = ("seed", "examples", "deep", "slow", "timeout")
PACKAGES = (
    "numpy", "array-api-compat", "array-api-extra", "array-api-strict", "hypothesis", "torch", "jax", "cupy", "ml_dtypes",
    "transformers",
)  # fmt: skip


class ResultsError(Exception):
    """A file that holds no results: says the file and what is wrong."""


def write_json(path: Path, implementation: Any, asked: Asked, results: list[Result]) -> None:
    """Raises OSError."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    who: dict[str, Any] = {name: getattr(implementation, name) for name in ("name", "version", "language", "level")}
    who["families"] = [family for family in FAMILIES if getattr(implementation, family, None) is not None]
    who["formats"] = list(implementation.formats)
    document = {
        "format": FORMAT,
        "kvref": kvref.__version__,
        "implementation": who,
        "environment": {"python": platform.python_version(), "platform": platform.platform(), "packages": versions},
        "asked": {"name": asked.name, **{name: getattr(asked.effort, name) for name in OPTIONS}, "isolate": asked.isolate},
        "clauses": [{**result, "trace": _relative(result["trace"], path)} for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _relative(trace: str | None, beside: Path) -> str | None:
    return trace and Path(os.path.relpath(trace, beside.parent)).as_posix()


def read_json(path: Path) -> dict[str, Any]:
    """Results that `write_json` wrote. Raises ResultsError, or OSError."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: not JSON: {error}") from None
    if isinstance(document, dict) and document.get("format") not in (None, FORMAT):
        raise ResultsError(f"{path}: results of format {document['format']!r}; this kvref reads format {FORMAT}")
    if wrong := mismatch(document, *SCHEMA):
        raise ResultsError(f"{path}: not results of kvref check --json: {wrong}")
    return document
