"""Questions about the results of calls, and their right answers, which come from the reference."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np

_right: dict[int, Any] = {}


def ask(number: int, value: Any) -> None:
    """Ask what `value` is. A file calls.py contains one call per question."""
    _right[number] = plain(value)


def right_answers(calls: Path) -> dict[int, Any]:
    """Run calls.py. Return the right answer to each question: a number, a text or a list."""
    _right.clear()
    runpy.run_path(str(calls))
    return dict(_right)


def question(calls: str, number: int) -> tuple[str, int]:
    """Return the expression that question `number` asks about, and its line in the text of calls.py."""
    start = f"ask({number}, "
    for line, text in enumerate(calls.splitlines(), start=1):
        if start in text:
            return text.partition(start)[2].rpartition(")")[0], line
    raise KeyError(number)


def plain(value: Any) -> Any:
    """Return the value with arrays and tuples as lists, so that answers can be compared."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
