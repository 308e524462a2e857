"""The results of a run as JSON, as defined by results.schema.json in this folder."""

import json
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvref
from kvref_conformance.clauses import all_clauses
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import offers
from kvref_conformance.json_schema import schema_mismatch
from kvref_conformance.results import Result
from kvref_conformance.runner.causes import probable_causes
from kvref_conformance.runner.options import RunOptions
from kvref_conformance.runner.subprocess_runner import runs_in_subprocess
from kvref_conformance.runner.verdict import RunVerdict

FORMAT = 3
MAX_FILE_BYTES = 2**26  # maximum bytes of a file; a run of all clauses has a few hundred thousand
SCHEMA = ("kvref_conformance.report", "results.schema.json")
EFFORT_OPTIONS = ("seed", "examples", "deep", "slow", "real", "timeout")
EMPTY_FIELDS: dict[str, Any] = {
    "what": "",
    "expected": "",
    "got": "",
    "where": "",
    "cause": "",
    "missing": "",
    "calls": [],
    "through": [],
    "trace": None,
    "evidence": None,
}  # left out
PACKAGES = (
    "numpy", "array-api-compat", "array-api-extra", "array-api-strict", "hypothesis", "torch", "jax", "cupy", "ml_dtypes",
    "transformers", "xllamacpp", "ctranslate2", "onnxruntime-genai", "openvino-genai",
)  # fmt: skip


class ResultsError(Exception):
    """A file does not contain valid results. The message names the file and the problem."""


def write_json(
    path: Path,
    implementation: Any,
    run_options: RunOptions,
    results: list[Result],
    conclusion: RunVerdict,
    interrupted: bool = False,
) -> None:
    """Write the results of a run. interrupted: results of some selected clauses are missing. Raises OSError."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    who: dict[str, Any] = {name: getattr(implementation, name) for name in ("name", "version", "language", "level")}
    who["project"] = getattr(implementation, "project", implementation.name)
    who["families"] = [family for family in families() if offers(implementation, family)]
    who["formats"] = list(implementation.formats)
    document = {
        "format": FORMAT,
        "kvref": kvref.__version__,
        "implementation": who,
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": versions,
            "date": datetime.now(UTC).date().isoformat(),
        },
        "asked": {
            "name": run_options.name,
            **{name: getattr(run_options.effort, name) for name in EFFORT_OPTIONS},
            "isolate": runs_in_subprocess(run_options),
        },
        "conclusion": vars(conclusion),
        **({"interrupted": True} if interrupted else {}),
        **({"causes": causes} if (causes := _causes_as_data(results)) else {}),
        "not_offered": [result["clause"] for result in results if not result["offered"]],
        "clauses": [_drop_empty_fields(result) for result in results if result["offered"]],
    }
    path.write_text(format_document(document), encoding="utf-8")


def format_document(document: dict[str, Any]) -> str:
    """The document as JSON with one clause per line, so that a difference between two runs shows its clauses."""
    head = json.dumps({**document, "clauses": []}, indent=1).removesuffix("[]\n}")
    lines = ",\n".join(f"  {json.dumps(clause)}" for clause in document["clauses"])
    return f"{head}[\n{lines}\n ]\n}}\n"


def _causes_as_data(results: list[Result]) -> list[list[str]]:
    return [cause.clauses for cause in probable_causes(results)]


def _drop_empty_fields(result: Result) -> Result:
    """The result without empty fields and without the checks of families that the implementation does not offer."""
    asked = [check for check in result["checks"] if not check["missing"].startswith("family ")]
    checks = [
        {name: value for name, value in check.items() if name != "evidence" and (name not in EMPTY_FIELDS or value)}
        for check in asked
    ]
    return {**result, "trace": result["trace"] and Path(result["trace"]).as_posix(), "checks": checks}


def read_json(path: Path) -> dict[str, Any]:
    """Read and validate results, which are untrusted input. Raises ResultsError or OSError."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ResultsError(f"{path}: not results of kvref check --json: larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        document: dict[str, Any] = json.loads(content.decode("utf-8"), parse_constant=_reject_constant)
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # not text, not JSON, a lone surrogate, a number with thousands of digits
        raise ResultsError(f"{path}: not valid JSON: {str(error)[:200]}") from None
    if isinstance(document, dict) and document.get("format") not in (None, FORMAT):
        raise ResultsError(f"{path}: results of format {repr(document['format'])[:20]}; this kvref reads format {FORMAT}")
    if wrong := schema_mismatch(document, *SCHEMA) or _duplicate_clause(document):
        raise ResultsError(f"{path}: not results of kvref check --json: {wrong}")
    for result in document["clauses"]:
        result["checks"] = [{**EMPTY_FIELDS, **check} for check in result["checks"]]
    document["clauses"] += [_not_offered_result(clause) for clause in document.pop("not_offered")]
    order = {clause: number for number, clause in enumerate(all_clauses())}
    document["clauses"].sort(key=lambda result: order.get(result["clause"], len(order)))
    return document


def _not_offered_result(id: str) -> Result:
    """The result of a clause without a check for an offered family."""
    clause = all_clauses().get(id)
    title, chapter = (clause.title, clause.chapter) if clause else ("", id.partition("-")[0])
    digest = clause.digest if clause else ""
    result: Result = {"clause": id, "title": title, "chapter": chapter, "digest": digest, "verdict": "not offered"}
    return result | {
        "offered": False, "missing": [], "through": [], "reason": None, "shown": None, "trace": None, "checks": [],
    }  # fmt: skip


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")  # Python's parser accepts NaN, Infinity and -Infinity


def _duplicate_clause(document: dict[str, Any]) -> str:
    counted = Counter([*(result["clause"] for result in document["clauses"]), *document["not_offered"]])
    return next((f"{clause} occurs {count} times" for clause, count in counted.items() if count > 1), "")
