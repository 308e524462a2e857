"""Marks of tests that take long."""

from collections.abc import Iterable
from typing import Any

import pytest


def half_long(parameters: Iterable[Any]) -> list[Any]:
    """The parameters, of which every second runs only in `nox -s long`, so that CI takes less time."""
    return [_long(each) if at % 2 else each for at, each in enumerate(parameters)]


def _long(parameter: Any) -> Any:
    name = getattr(parameter, "id", None)
    values = parameter.values if hasattr(parameter, "values") else parameter if isinstance(parameter, tuple) else (parameter,)
    return pytest.param(*values, id=name, marks=pytest.mark.long)
