"""The zoo: caches that are wrong on purpose, each a few lines over a right one, most of them modelled on a public bug report.

They test the judge, and users can try the judge on them. There is one module per family; the decorator `mutant` adds a member.
Each member names the clause that must find its bug. `kvref zoo` and `conformance/tests/test_zoo.py` check that this clause fails.

Two other kinds of bugs test the judge. Those in `conformance/tests/bugs` replace parts of the reference while a test runs: they
reach the inside of every operation, so that each clause has a bug. mutmut (`nox -s mutation`) changes the source of the reference
at random; `conformance/tests/mutants.py` counts how many of these changes the tests notice.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from kvref_zoo.mutant import MUTANTS, Mutant


@cache
def _mutants() -> dict[str, Mutant]:
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    return dict(sorted(MUTANTS.items()))


def names() -> list[str]:
    """Returns the names of all members, without the prefix `zoo:` that `kvref check` expects."""
    return list(_mutants())


def member(name: str) -> Mutant:
    """Returns the implementation with this bug. Raises KeyError for an unknown name."""
    return _mutants()[name]


def members() -> Iterator[Mutant]:
    yield from _mutants().values()
