"""The traces that results name. Results come from anywhere, so only what is such a trace is ever looked at.

They lie in `.kvref/failures`, below the folder of the results or one above it, or below the current folder: where `kvref check`
leaves them. A name or a link that leads elsewhere, what is no trace, and a trace of another failure are not there for a report.
"""

import re
from pathlib import Path
from typing import Any

from kvref_conformance.conversation.trace.file import Header, TraceError, parsed

FOLDER = Path(".kvref/failures")
NAME = re.compile(r"\.kvref/failures/([A-Za-z0-9_=+-][A-Za-z0-9_.=+-]*\.jsonl)")  # as in results.schema.json
LARGEST = 2**26  # bytes


def find_trace(results: Path, named: str, clause: str, failed: dict[str, Any]) -> str | None:
    """The text of the trace that a file of results names, if it is of that failure of the clause: what, expected, got, cause."""
    name = NAME.fullmatch(named)
    if name is None:
        return None
    project = results.resolve().parent
    for folder in (project, *project.parents, Path.cwd()):
        text = _text(folder.resolve() / FOLDER, name[1])
        header = _header(text) if text else None
        if header and header.clause == clause and header.failed == failed:
            return text
    return None


def _text(folder: Path, name: str) -> str | None:
    """Of a regular file that lies in the folder itself, wherever links may lead."""
    try:
        path = (folder / name).resolve(strict=True)
        if path.parent != folder or not path.is_file() or path.stat().st_size > LARGEST:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError):  # not there, links in a circle, not text
        return None


def _header(text: str) -> Header | None:
    try:
        return parsed(Path("trace"), text.splitlines()).header
    except TraceError:
        return None
