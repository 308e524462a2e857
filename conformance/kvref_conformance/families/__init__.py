"""The families. Each folder contains everything about how one kind of cache or component is judged.

    __init__.py             the record (FAMILY): sizes, clauses and names that all parts of the judge use; the operations as a
                            typed protocol, the errors that each can be required to raise, and one sample call of each
    model.py                the reference model: the expected result of each operation, computed with lists and dicts
    checks*.py              the checks of the clauses, as functions
    state_machine.py        the state machine (random call sequences), and the states that it should reach
    law_adapter.py          the adapter by which the laws use the family; the methods it overrides decide which laws apply
    derived_operations.py   derived operations, for implementations that lack some operations
    soak_driver.py          the adapter by which `kvref soak` serves requests, if a law adapter is not enough
    diagnosis.py            the likely cause of a failure, if more is known than the wrong result

To add a family, add a folder: all parts of the judge find the families with `all_families`. The folder `laws` has no record,
because laws are checked on the other families.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from kvref_conformance.clauses import CHAPTERS

PARTS = ("model", "state_machine", "law_adapter", "soak_driver", "derived_operations", "diagnosis")


@dataclass(frozen=True)
class Family:
    """The record of a family: one kind of object that an implementation can provide.

    name: the name of the factory and of the folder.
    chapter: the file of its chapter, kvref/spec/CHAPTER.md.
    small: the sizes that checks use by default. All are different, so that a confusion of two axes is noticed.
    speaks_for: the clauses that the reference model can name. The state machine judges these.
    gives: operation -> name of its result in printed calls, for results that later calls use as arguments.
    several: argument -> name of one element, for arguments that are lists of such results.
    formats: size -> the formats that it can be, for sizes that are the name of a format.
    may_be_zero: the sizes that can be 0.
    holds: size -> other sizes whose sum it must not be less than.
    multiples: size -> another size that must divide it.
    fits: whether a configuration is valid (LAW-12), beyond `holds` and `multiples`. It also decides which single sizes are used:
        if a size is not valid with the small sizes and any format, the nearest one that is valid replaces it.
    goes: like `fits`, for whole configurations only, if sizes depend on each other and not on a format.
    token_axis: the axis of the appended arrays that counts tokens, from the end; 0 if arrays with different numbers of axes are
        appended together.
    appending: operation -> its array arguments, for operations that accept any number of tokens.
    whole: operations of `appending` that have a different result if their tokens are divided into several calls.
    counted_as: name of a switch among the limits -> function that wraps a factory, so that its objects count as the specification
        does.
    encodes: True if formats are encodings of numbers, and not the dtype of the caller's arrays.
    """

    name: str
    chapter: str
    small: dict[str, Any] = field(default_factory=dict)
    speaks_for: Sequence[str] = ()
    gives: Mapping[str, str] = field(default_factory=dict)
    several: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, Sequence[str]] = field(default_factory=dict)
    may_be_zero: Sequence[str] = ()
    holds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    multiples: Mapping[str, str] = field(default_factory=dict)
    fits: Callable[[Mapping[str, Any]], bool] = lambda config: True
    goes: Callable[[Mapping[str, Any]], bool] = lambda config: True
    token_axis: int = -3
    appending: Mapping[str, Sequence[str]] = field(default_factory=dict)
    whole: Sequence[str] = ()
    counted_as: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    encodes: bool = False

    def together(self, config: Mapping[str, Any]) -> bool:
        """Returns whether sizes that are valid one by one are valid together."""
        enough = all(config[whole] >= sum(config[part] for part in parts) for whole, parts in self.holds.items())
        even = all(config[whole] % config[part] == 0 for whole, part in self.multiples.items())
        return enough and even and self.fits(config) and self.goes(config)

    def part(self, name: str) -> ModuleType | None:
        """Returns the module `name` (one of PARTS) of the family, or None if there is no such file."""
        return _module(f"{__name__}.{self.name}.{name}")

    def checks(self) -> Iterator[ModuleType]:
        """Yields the modules of its checks. Importing a module registers its checks."""
        yield from check_modules(self.name)

    @property
    def interface(self) -> Any:
        """The package with its typed protocols, ERRORS and `sample_calls`."""
        return import_module(f"{__name__}.{self.name}")

    @property
    def protocol(self) -> Any:
        """The typed protocol of the family's objects."""
        return getattr(self.interface, self.name.capitalize())

    @property
    def model(self) -> Any:
        return self._of("model", "")

    @property
    def state_machine(self) -> Any:
        """The class of its state machine, or None."""
        return self._of("state_machine", "StateMachine")

    @property
    def law_adapter(self) -> Any:
        """The class of its law adapter, or None."""
        return self._of("law_adapter", "LawAdapter")

    def _of(self, part: str, suffix: str) -> Any:
        module = self.part(part)
        return module and getattr(module, f"{self.name.capitalize()}{suffix}")


@cache
def all_families() -> dict[str, Family]:
    """Returns the records by name, in the order of the chapters of the specification."""
    found = [module.FAMILY for name in folders() if hasattr(module := import_module(f"{__name__}.{name}"), "FAMILY")]
    return {family.name: family for family in sorted(found, key=lambda family: (CHAPTERS.index(family.chapter), family.name))}


def folders() -> list[str]:
    """Returns the names of all folders: the families and the laws."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]


def check_modules(folder: str) -> Iterator[ModuleType]:
    """Yields the modules of one folder whose names begin with "checks"."""
    package = import_module(f"{__name__}.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("checks"):
            yield import_module(f"{package.__name__}.{module.name}")


@cache
def _module(name: str) -> ModuleType | None:
    return import_module(name) if find_spec(name) else None


def names() -> tuple[str, ...]:
    """Returns the names of the families, in the order of the chapters."""
    return tuple(all_families())
