"""Checks of counters after invalid calls: a counter is never negative and never exceeds its maximum."""

from collections.abc import Callable, Iterable
from typing import Any

from kvref_conformance.checking.expect import true
from kvref_conformance.outcome import Broken

MANY = 2**53 - 1  # the largest integer that every JSON parser represents exactly
NEGATIVE = (-1, -3, -MANY)
Counter = tuple[str, Any, float]  # its name, its value, its maximum


def tried(call: Callable[..., Any], *args: Any) -> None:
    """Make a call that may raise any error, or may not be offered. Raises Broken if it does not return."""
    try:
        call(*args)
    except Broken:
        raise
    except Exception:
        return


def within_bounds(counters: Iterable[Counter], after: str) -> None:
    """Raise Broken if a counter is negative or exceeds its maximum."""
    for name, number, most in counters:
        true(0 <= number <= most, f"{name} after {after}", f"a number in [0, {most}]", number)
