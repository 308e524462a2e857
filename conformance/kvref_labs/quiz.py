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
    """Return question `number` and its line in the text of calls.py.

    The question is the comment of its paragraph if that ends with a question mark, and else the expression that is asked for.
    """
    start = f"ask({number}, "
    lines = calls.splitlines()
    line = next(at for at, text in enumerate(lines) if start in text)
    paragraph = "\n".join(lines[:line]).rpartition("\n\n")[2]
    comment = " ".join(text.removeprefix("# ") for text in paragraph.splitlines() if text.startswith("# "))
    expression = lines[line].partition(start)[2].rpartition(")")[0]
    return comment if comment.endswith("?") else expression, line + 1


def plain(value: Any) -> Any:
    """Return the value with arrays and tuples as lists, so that answers can be compared."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
