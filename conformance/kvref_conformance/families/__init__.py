"""The families: a folder each, in which lies all that there is to know about how one kind of cache is judged.

    __init__.py    the record: sizes, clauses and words that every part of the judge asks for
    interface.py   the operations, as a typed protocol, and the errors that each may have to answer with
    model.py       what each operation must answer: the cache in lists and dicts
    checks*.py     what each clause demands, as functions
    machine.py     any sequence of calls, and states.py those worth meeting
    stream.py      what the laws need to know, which hold for every family that says it
    derived.py     operations made of others, for implementations that lack them
    serving.py     what `kvref soak` serves requests from, where a stream is not enough
    steps.py       each operation once, for the self-test of a harness
    cause.py       what lies behind a failure, where more can be told than what came instead

To add a family is to add a folder: whatever works on families asks `all_families`. The laws are a folder of their own without
a record, for they are about the others.
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

PARTS = ("interface", "model", "machine", "states", "stream", "serving", "derived", "steps", "cause")


@dataclass(frozen=True)
class Family:
    """One kind of object that an implementation may offer.

    chapter: of the specification, by its file. small: the sizes that checks begin with, all different, so that an axis taken for
    another shows. speaks_for: the clauses that the model can name, and the machine therefore judges. gives: what a person calls
    the result of an operation, which later calls refer to; several: arguments that are lists of such, and what one is called.
    formats: what each format among the sizes may be. may_be_zero: sizes that may. holds: sizes that are no less than others
    together, multiples: that are multiples of another, fits: whether all of them make sense together (LAW-12), one by one too: a
    size that does not go with the small ones and any format is made one that does; goes: the same, of those alone that are asked
    for, where sizes depend on each other and not on a format. token_axis: of the arrays that are appended, where the tokens lie,
    from the end. appending: the operations that take any number of tokens, and their arrays; whole: those of them that leave more
    in one call than in several. counted_as: by a switch among the limits, what makes an object that counts as the specification
    does, of what makes the object. encodes: formats are what numbers are encoded to, and say nothing of what they are handed in
    as.
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
        """Whether sizes that each make sense alone do so together."""
        enough = all(config[whole] >= sum(config[part] for part in parts) for whole, parts in self.holds.items())
        even = all(config[whole] % config[part] == 0 for whole, part in self.multiples.items())
        return enough and even and self.fits(config) and self.goes(config)

    def part(self, name: str) -> ModuleType | None:
        """One of PARTS, or None where the family has no such file."""
        return _module(f"{__name__}.{self.name}.{name}")

    def checks(self) -> Iterator[ModuleType]:
        """The modules of its checks; importing one registers them."""
        yield from check_modules(self.name)

    @property
    def interface(self) -> Any:
        """The module of its typed protocols. Every family has one."""
        return import_module(f"{__name__}.{self.name}.interface")

    @property
    def protocol(self) -> Any:
        """Of its objects."""
        return self._of("interface", "")

    @property
    def model(self) -> Any:
        return self._of("model", "")

    @property
    def machine(self) -> Any:
        """Its class of machine, or None."""
        return self._of("machine", "Machine")

    @property
    def stream(self) -> Any:
        """Its class of stream, or None."""
        return self._of("stream", "Stream")

    def _of(self, part: str, suffix: str) -> Any:
        module = self.part(part)
        return module and getattr(module, f"{self.name.capitalize()}{suffix}")


@cache
def all_families() -> dict[str, Family]:
    """The records by name, in the order of the specification's chapters."""
    found = [module.FAMILY for name in folders() if hasattr(module := import_module(f"{__name__}.{name}"), "FAMILY")]
    return {family.name: family for family in sorted(found, key=lambda family: (CHAPTERS.index(family.chapter), family.name))}


def folders() -> list[str]:
    """Every folder here: the families, and the laws."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]


def check_modules(folder: str) -> Iterator[ModuleType]:
    """The modules of one folder whose names begin with "checks"."""
    package = import_module(f"{__name__}.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("checks"):
            yield import_module(f"{package.__name__}.{module.name}")


@cache
def _module(name: str) -> ModuleType | None:
    return import_module(name) if find_spec(name) else None


def names() -> tuple[str, ...]:
    """Of the families, in order."""
    return tuple(all_families())
