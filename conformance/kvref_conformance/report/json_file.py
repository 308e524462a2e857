"""The machine-readable result of a run."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvref
from kvref_conformance.report.text import Result

PACKAGES = ("numpy", "array-api-compat", "array-api-strict", "torch", "cupy", "ml_dtypes", "transformers")


def write_json(path: Path, implementation: Any, seed: int, results: list[Result]) -> None:
    """Raises OSError."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    document = {
        "format": 1,
        "kvref": kvref.__version__,
        "implementation": {name: getattr(implementation, name) for name in ("name", "version", "language", "level")},
        "environment": {"python": platform.python_version(), "platform": platform.platform(), "packages": versions},
        "seed": seed,
        "clauses": results,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
