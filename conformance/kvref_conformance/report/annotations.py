"""Annotations of GitHub: each probable cause of failures, at the line of the code that raised an error if there is one."""

from collections.abc import Iterator
from typing import Any

from kvref_conformance.report.results_model import ResultFile

MAX_CALLS = 12  # last calls of a reproducer that an annotation shows


def annotations(run: ResultFile) -> Iterator[str]:
    """Yield one workflow command per probable cause, which GitHub shows in the changed files of a pull request."""
    for clause, *others in run.document.get("causes", ()):
        result = run.verdicts.get(clause)
        check = next((each for each in result["checks"] if each["check"] == result["shown"]), None) if result else None
        if result is None or check is None:
            continue  # not results that kvref wrote
        file, _, line = check["where"].rpartition(":")
        place = {"file": file, "line": line} if file and line.isdigit() else {}
        place["title"] = f"{clause} · {result['title']} ({run.name})"
        fields = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in place.items())
        yield f"::error {fields}::{_escaped(_message(check, others))}"


def _message(check: dict[str, Any], others: list[str]) -> str:
    lines = [*check["calls"][-MAX_CALLS:], f"{check['what']}: expected {check['expected']}, got {check['got']}"]
    lines += [f"also fail, probably for the same reason: {', '.join(others)}"] if others else []
    return "\n".join(lines)


def _escaped(text: str, more: str = "") -> str:
    """The text with the characters that end a field of a workflow command replaced by their codes. more: further ones."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
