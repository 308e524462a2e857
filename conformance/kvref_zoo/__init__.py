"""The zoo: caches that are wrong on purpose, each a few lines over a right one, most of them modelled on a public bug report.

They test the judge. Each member names the clause that must find its bug; `kvref zoo` and `conformance/tests/test_zoo.py` check
that this clause fails for it. The docstring of a member's module describes the bug to users (`story`).
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from kvref_zoo.right import Right


def names() -> list[str]:
    """Returns the names of all members, without the prefix `zoo:` that `kvref check` expects."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(__path__) if module.name != "right")


def member(name: str) -> Right:
    """Returns a new implementation with this bug. Raises KeyError for an unknown name."""
    if name not in names():
        raise KeyError(name)
    found: Right = import_module(f"kvref_zoo.{name.replace('-', '_')}").Implementation()
    return found


def story(name: str) -> str:
    """Returns the description of the bug, one or two sentences."""
    return (import_module(f"kvref_zoo.{name.replace('-', '_')}").__doc__ or "").strip()


def members() -> Iterator[Right]:
    yield from map(member, names())
