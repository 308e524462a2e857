"""Counters under wrong use: what no count may ever be."""

from collections.abc import Callable, Iterable
from typing import Any

from kvref_conformance.checking.expect import true
from kvref_conformance.outcome import Broken

MANY = 2**53 - 1  # the largest integer that JSON has everywhere
NEGATIVE = (-1, -3, -MANY)
Counter = tuple[str, Any, float]  # what it counts, the number, the most that there is


def tried(call: Callable[..., Any], *args: Any) -> None:
    """Make a call that may be refused, in whatever words, or not be offered. Raises Broken where none came back from it."""
    try:
        call(*args)
    except Broken:
        raise
    except Exception:
        return


def within_bounds(counters: Iterable[Counter], after: str) -> None:
    for name, number, most in counters:
        true(0 <= number <= most, f"{name} after {after}", f"a number in [0, {most}]", number)
