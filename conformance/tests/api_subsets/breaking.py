"""The decorator that registers a bug in one of these caches: a derived class, and the clause that must fail."""

from collections.abc import Callable
from typing import Any

import pytest

from api_subsets import Host

BROKEN: list[Any] = []


def breaks(clause: str, right: type[Host]) -> Callable[[type], type]:
    """Register a cache that is like `right` except for one bug, which this clause must catch."""

    def register(cache: type) -> type:
        (family,) = (name for name in ("paged", "quantized", "attention") if name in vars(right))
        wrong = type(right.__name__, (right,), {family: cache, "name": f"{right.name}, {cache.__name__}"})
        BROKEN.append(pytest.param(wrong(), clause, id=f"{right.__name__}-{clause}-{cache.__name__}"))
        return cache

    return register
