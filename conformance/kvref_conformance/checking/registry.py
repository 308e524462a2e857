"""The checks, by clause: a check is a function of a Subject that raises Broken, and its name is a sentence."""

import re
import zlib
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from inspect import unwrap
from typing import TypeVar

from kvref_conformance.checking.streams import Stream, knows
from kvref_conformance.clauses import all_clauses
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import Family, all_families, check_modules, names

LAWS = "kvref_conformance.families.laws."
_CITATION = re.compile(r"(?P<clause>[A-Z0-9-]+-\d\d)(?P<letters>[a-z]*)")
Run = Callable[[Subject], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """clause: the id of the clause it tests. letters: which of the clause's lettered requirements, "" if there are none.

    family: what an implementation must provide. slow, real: runs only with --slow or --real.
    run: the check itself; None stands for the family's state machine, which tests many clauses.
    """

    clause: str
    family: str
    run: Run | None
    slow: bool = False
    real: bool = False
    letters: str = ""

    @property
    def option(self) -> str:
        """With which it runs; nothing where it always does."""
        return "--slow" if self.slow else "--real" if self.real else ""

    @property
    def name(self) -> str:
        words = self.run.__name__.replace("_", " ") if self.run else "any sequence of calls"
        return f"{words} ({self.family})"

    @property
    def source(self) -> str:
        """file:line of a check that is written out."""
        assert self.run
        code = unwrap(self.run).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    @property
    def seed(self) -> int:
        """A number of its own, so that a check draws the same numbers whichever others run."""
        return zlib.crc32(f"{self.clause} {self.name}".encode())


class CheckError(Exception):
    """A check names no clause, no family or no requirement that there is, or a requirement has no check."""


_REGISTERED: list[Check] = []


def check(clause: str, family: str, slow: bool = False, real: bool = False) -> Callable[[Run], Run]:
    """Register a function as a check of a clause, "PAGED-03", or of some of its lettered requirements, "PAGED-18bc"."""

    def register(run: Run) -> Run:
        if family not in names():
            raise CheckError(f"{run.__name__}: expected a family ({', '.join(names())}), got {family!r}")
        named = _CITATION.fullmatch(clause)
        if not named:
            raise CheckError(f"{run.__name__}: expected a clause such as PAGED-03 or PAGED-18bc, got {clause!r}")
        _REGISTERED.append(Check(named["clause"], family, run, slow, real, named["letters"]))
        return run

    return register


def law(clause: str, *facts: str, real: bool = False) -> Callable[[Callable[[Stream], None]], Callable[[Stream], None]]:
    """Register a function of a fresh stream as a check of `clause` for each family that has one, and knows these facts."""

    def register(run: Callable[[Stream], None]) -> Callable[[Stream], None]:
        for family in all_families().values():
            stream = family.stream
            if stream is not None and all(knows(stream, fact) for fact in facts):
                _register(clause, family.name, run, partial(_streaming, run, stream), real)
        return run

    return register


def of_each_configuration(clause: str) -> Callable[[Callable[[Subject, Family], None]], Callable[[Subject, Family], None]]:
    """Register a function of (subject, record) as a check of `clause` for each family that is made with sizes."""

    def register(run: Callable[[Subject, Family], None]) -> Callable[[Subject, Family], None]:
        for family in all_families().values():
            if family.small:
                _register(clause, family.name, run, partial(_second, run, family))
        return run

    return register


def asked_of(family: str, of: str, but: Container[str] = ()) -> None:
    """Register the checks of one family for another that does everything the first does; but for some clauses, and the laws'."""
    list(check_modules(of))
    for each in [each for each in _REGISTERED if each.family == of and each.clause not in but]:
        if each.run is not None and not isinstance(each.run, partial):
            check(each.clause + each.letters, family, each.slow, each.real)(each.run)


def _second(run: Callable[[Subject, T], None], about: T, subject: Subject) -> None:
    run(subject, about)


def _streaming(run: Callable[[Stream], None], stream: type[Stream], subject: Subject) -> None:
    run(stream(subject))


def _register(clause: str, family: str, run: Callable[..., None], of_family: Run, real: bool = False) -> None:
    """A check that is called like `run` and stands where it stands."""
    check(clause, family, real=real)(update_wrapper(of_family, run))


def validate(checks: list[Check]) -> None:
    """Raise CheckError unless each check names a clause, and each clause and lettered requirement has a check."""
    known = all_clauses()
    cited: dict[str, set[str]] = {}
    for each in checks:
        if each.clause not in known:
            raise CheckError(f"check {each.name!r} names no clause of the specification: {each.clause}")
        letters = known[each.clause].letters
        if each.run and (not set(each.letters) <= set(letters) or bool(letters) != bool(each.letters)):
            wanted = f"some of ({', '.join(letters)})" if letters else "no letter"
            raise CheckError(f"check {each.name!r} of {each.clause}: expected {wanted}, got {each.letters!r}")
        cited.setdefault(each.clause, set()).update(each.letters)
    if untested := [f"{id} ({each})" for id, clause in known.items() for each in clause.letters if each not in cited.get(id, ())]:
        raise CheckError(f"lettered requirements without a check: {', '.join(untested)}")
    unchecked = [clause for clause in known if clause not in {each.clause for each in checks if each.run}]
    if unchecked:
        raise CheckError(f"clauses without a check: {', '.join(unchecked)}")


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check, the laws' first, then family by family, then the machines, validated. Raises CheckError."""
    for folder in ("laws", *names()):
        list(check_modules(folder))
    written = sorted(_REGISTERED, key=_place)
    searches = [Check(clause, family.name, None) for family in all_families().values() for clause in family.speaks_for]
    validate(written + searches)
    return tuple(written + searches)


@cache
def _letters() -> dict[tuple[str, str], str]:
    return {(each.clause, each.name): each.letters for each in all_checks()}


def citation(clause: str, name: str) -> str:
    """A clause with the letters of what the named check tests of it: "PAGED-18 (b)"."""
    letters = _letters().get((clause, name), "")
    return f"{clause} ({', '.join(letters)})" if letters else clause


def _place(check: Check) -> tuple[int, str, int, int]:
    """Where a check that is written out stands among others, whichever module was imported first."""
    assert check.run
    run, family = unwrap(check.run), names().index(check.family)
    law = run.__module__.startswith(LAWS)
    return (-1 if law else family), run.__module__, run.__code__.co_firstlineno, family
