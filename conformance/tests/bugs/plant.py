"""Decorators and helpers to plant bugs, by replacing a method or some words in its source."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

BUGS: list[Any] = []
HIDDEN: list[Any] = []  # for a state machine to find
DEFERRED: list[Any] = []  # for a state machine to find, between two calls with nothing read between them
REAL: list[Any] = []  # that no small size shows


def bug(*clauses: str, family: str = "") -> Callable[[Any], Any]:
    """Register a function that plants one bug; each of the clauses must fail with it. family: whose checks alone must find it."""

    def register(plant: Any) -> Any:
        BUGS.extend(pytest.param(plant, clause, family, id=f"{clause}-{plant.__name__}") for clause in clauses)
        return plant

    return register


def hidden(family: str, clause: str) -> Callable[[Any], Any]:
    """Register a bug that shows in few states: the family's state machine must find the clause broken."""

    def register(plant: Any) -> Any:
        HIDDEN.append(pytest.param(plant, family, clause, id=f"{clause}-{plant.__name__}"))
        return plant

    return register


def deferred(family: str, clause: str) -> Callable[[Any], Any]:
    """Register a bug of two calls with nothing read between them: the family's state machine must find the clause broken."""

    def register(plant: Any) -> Any:
        DEFERRED.append(pytest.param(plant, family, clause, id=f"{clause}-{plant.__name__}"))
        return plant

    return register


def real(*families: str) -> Callable[[Any], Any]:
    """Register a bug that shows at production sizes only, in these families: LAW-18 must fail, and nothing else."""

    def register(plant: Any) -> Any:
        REAL.extend(pytest.param(plant, family, id=f"{family}-{plant.__name__}") for family in families)
        return plant

    return register


def in_source(patch: pytest.MonkeyPatch, path: str, *changes: str) -> None:
    """Replace words in the source of the function at a dotted path (old, new, old, new, ...) and install the result."""
    parent, _, name = path.rpartition(".")
    holder = pkgutil.resolve_name(parent)
    found = inspect.getattr_static(holder, name)
    function = found.fget if isinstance(found, property) else found
    source = inspect.cleandoc("\n" + inspect.getsource(function)).removeprefix("@property\n")
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, f"{path} no longer has {old!r}: this bug has to be planted elsewhere"
        source = source.replace(old, new)
    scope: dict[str, Any] = {}
    exec(source, function.__globals__ | {"np": np}, scope)
    patch.setattr(holder, name, property(scope[name]) if isinstance(found, property) else scope[name])
