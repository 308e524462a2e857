"""Finds the traces that a file of results names.

Traces are in `.kvref/failures` in the folder of the results, in one of its parents, or in the current folder, where `kvref check`
writes them. Results are untrusted input: names or links that lead to other folders, files that are no traces, and traces of other
failures are ignored.
"""

import re
from pathlib import Path
from typing import Any

from kvref_conformance.traces.format import Header, TraceError, parse_trace

FAILURES_FOLDER = Path(".kvref/failures")
TRACE_NAME = re.compile(r"\.kvref/failures/([A-Za-z0-9_=+-][A-Za-z0-9_.=+-]*\.jsonl)")  # as in results.schema.json
MAX_TRACE_BYTES = 2**26  # bytes


def find_trace(results: Path, named: str, clause: str, failed: dict[str, Any]) -> str | None:
    """The text of a trace, or None.

    results: the file of results. named: the path of the trace in it. clause, failed: the failure that the trace must show
    (`failed` has what, expected, got, and cause if known).
    """
    name = TRACE_NAME.fullmatch(named)
    if name is None:
        return None
    project = results.resolve().parent
    for folder in (project, *project.parents, Path.cwd()):
        text = _read_text(folder.resolve() / FAILURES_FOLDER, name[1])
        header = _parse_header(text) if text else None
        if header and header.clause == clause and header.failed == failed:
            return text
    return None


def _read_text(folder: Path, name: str) -> str | None:
    """The text of a regular file directly in the folder, after links are resolved; otherwise None."""
    try:
        path = (folder / name).resolve(strict=True)
        if path.parent != folder or not path.is_file() or path.stat().st_size > MAX_TRACE_BYTES:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError):  # missing, cyclic links, not text
        return None


def _parse_header(text: str) -> Header | None:
    try:
        return parse_trace(Path("trace"), text.splitlines()).header
    except TraceError:
        return None
