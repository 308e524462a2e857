"""The registry of checks.

A check is a function that takes a Subject and raises ClauseViolation if the implementation breaks a clause. Its name is a
sentence. Importing a module of checks registers them: `check` for one family, `law` and `configuration_check` for several
families.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from inspect import unwrap
from typing import TypeVar

from kvref_conformance.calls.subject import Subject
from kvref_conformance.clauses import all_clauses
from kvref_conformance.families import Family, all_families, check_modules, names
from kvref_conformance.testlib.law_adapter import LawAdapter, overrides

LAWS_PACKAGE = "kvref_conformance.families.laws."
_CITATION = re.compile(r"(?P<clause>[A-Z0-9-]+-\d\d)(?P<letters>a?b?c?d?e?f?g?h?i?j?)")
Run = Callable[[Subject], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One check of one clause for one family.

    clause: the id of the clause that it tests. family: the family that an implementation must provide. run: the function, or
    None for the family's state machine, which tests many clauses. slow, real: whether it runs only with --slow or --real.
    letters: which of the clause's lettered requirements it tests, "" if the clause has none.
    """

    clause: str
    family: str
    run: Run | None
    slow: bool = False
    real: bool = False
    letters: str = ""

    @property
    def option(self) -> str:
        """The command-line option that the check needs to run, or ""."""
        return "--slow" if self.slow else "--real" if self.real else ""

    @property
    def name(self) -> str:
        words = self.run.__name__.replace("_", " ") if self.run else "any sequence of calls"
        return f"{words} ({self.family})"

    @property
    def source(self) -> str:
        """The file:line of the function. A state machine has none."""
        assert self.run
        code = unwrap(self.run).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    @property
    def seed(self) -> int:
        """The seed of the check's random numbers. It depends on the check only, not on which other checks run."""
        return zlib.crc32(f"{self.clause} {self.name}".encode())


class CheckError(Exception):
    """A check names an unknown clause, family or requirement, or a clause or requirement has no check."""


_REGISTERED: list[Check] = []


def check(clause: str, family: str, slow: bool = False, real: bool = False) -> Callable[[Run], Run]:
    """Register a function as a check of a clause ("PAGED-03") or of some of its lettered requirements ("PAGED-18bc").

    Raises CheckError if the family or the form of the clause is unknown. `validate_checks` tests later whether the clause exists.
    """

    def register(run: Run) -> Run:
        if family not in names():
            raise CheckError(f"{run.__name__}: expected a family ({', '.join(names())}), got {family!r}")
        named = _CITATION.fullmatch(clause)
        if not named:  # unknown form, or letters that are repeated or not in order
            raise CheckError(f"{run.__name__}: expected a clause such as PAGED-03 or PAGED-18bc, got {clause!r}")
        _REGISTERED.append(Check(named["clause"], family, run, slow, real, named["letters"]))
        return run

    return register


def law(clause: str, *facts: str, real: bool = False) -> Callable[[Callable[[LawAdapter], None]], Callable[[LawAdapter], None]]:
    """Register a function of a new LawAdapter as a check of `clause`, for each family whose LawAdapter knows these facts.

    facts: names of LawAdapter members that the check uses (see `overrides`). Families without a LawAdapter have no laws.
    """

    def register(run: Callable[[LawAdapter], None]) -> Callable[[LawAdapter], None]:
        for family in all_families().values():
            stream = family.law_adapter
            if stream is not None and all(overrides(stream, fact) for fact in facts):
                _register(clause, family.name, run, partial(_call_with_stream, run, stream), real)
        return run

    return register


def configuration_check(clause: str) -> Callable[[Callable[[Subject, Family], None]], Callable[[Subject, Family], None]]:
    """Register a function of (Subject, Family) as a check of `clause`, for each family whose factory takes sizes."""

    def register(run: Callable[[Subject, Family], None]) -> Callable[[Subject, Family], None]:
        for family in all_families().values():
            if family.small:
                _register(clause, family.name, run, partial(_call_with_subject, run, family))
        return run

    return register


def share_checks(family: str, of: str, but: Container[str] = ()) -> None:
    """Register the checks of family `of` for `family` too, which provides all operations of `of`.

    but: clauses whose checks are left out. Checks made by `law` and `configuration_check` are never copied.
    """
    list(check_modules(of))
    for each in [each for each in _REGISTERED if each.family == of and each.clause not in but]:
        if each.run is not None and not isinstance(each.run, partial):
            check(each.clause + each.letters, family, each.slow, each.real)(each.run)


def _call_with_subject(run: Callable[[Subject, T], None], about: T, subject: Subject) -> None:
    run(subject, about)


def _call_with_stream(run: Callable[[LawAdapter], None], stream: type[LawAdapter], subject: Subject) -> None:
    run(stream(subject))


def _register(clause: str, family: str, run: Callable[..., None], of_family: Run, real: bool = False) -> None:
    """Register `of_family` as a check with the name and the source line of `run`."""
    check(clause, family, real=real)(update_wrapper(of_family, run))


def validate_checks(checks: list[Check]) -> None:
    """Raise CheckError unless names are unique, checks name clauses, and each clause and lettered requirement has a check."""
    known = all_clauses()
    named = Counter((each.clause, each.name) for each in checks if each.run)
    if repeated := [f"{clause} {name!r}" for (clause, name), count in named.items() if count > 1]:
        raise CheckError(f"checks of one clause with the same name: {', '.join(repeated)}")
    cited: dict[str, set[str]] = {}
    for each in checks:
        if each.clause not in known:
            raise CheckError(f"check {each.name!r} names an unknown clause: {each.clause}")
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
    """All checks: of the laws, then of each family, then the state machines. Raises CheckError if they are not valid."""
    for folder in ("laws", *names()):
        list(check_modules(folder))
    written = sorted(_REGISTERED, key=_sort_key)
    searches = [Check(clause, family.name, None) for family in all_families().values() for clause in family.speaks_for]
    validate_checks(written + searches)
    return tuple(written + searches)


@cache
def _letters() -> dict[tuple[str, str], str]:
    return {(each.clause, each.name): each.letters for each in all_checks()}


def citation(clause: str, name: str) -> str:
    """A clause id with the letters of the requirements that the named check tests: "PAGED-18 (b)"."""
    letters = _letters().get((clause, name), "")
    return f"{clause} ({', '.join(letters)})" if letters else clause


def _sort_key(check: Check) -> tuple[int, str, int, int]:
    """The sort key of a check with a function. It does not depend on the order in which modules were imported."""
    assert check.run
    run, family = unwrap(check.run), names().index(check.family)
    law = run.__module__.startswith(LAWS_PACKAGE)
    return (-1 if law else family), run.__module__, run.__code__.co_firstlineno, family
