"""The checks, by clause: a check is a function of a Subject that raises Broken, and its name is a sentence."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib import import_module
from inspect import unwrap

from kvref_conformance.clauses import all_clauses
from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.interface import FAMILIES
from kvref_conformance.oracle.witness import SPEAKS_FOR

Run = Callable[[Subject], None]

MODULES = (
    "laws_streams", "laws_errors", "laws_memory", "laws_arrays", "laws_counts", "laws_integers", "elements", "rows", "affine",
    "contiguous", "blocks", "paged", "paged_batches",
    "quantized", "tiered", "tiered_policy", "buffers", "buffers_threads", "pooled", "attention", "kernels",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """clause: its id. family: what an implementation must have. slow: runs only when asked for.

    run: the check itself; None stands for the family's state machine, which speaks for many clauses.
    """

    clause: str
    family: str
    run: Run | None
    slow: bool = False

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
    """A check that names no clause, or no family."""


_REGISTERED: list[Check] = []

CACHES = ("contiguous", "paged", "quantized", "tiered", "pooled")


def check(clause: str, family: str, slow: bool = False) -> Callable[[Run], Run]:
    """Register a function as a check of `clause`."""

    def register(run: Run) -> Run:
        if family not in FAMILIES:
            raise CheckError(f"{run.__name__}: expected a family ({', '.join(FAMILIES)}), got {family!r}")
        _REGISTERED.append(Check(clause, family, run, slow))
        return run

    return register


def check_each(clause: str, *families: str) -> Callable[[Callable[[Subject, str], None]], Callable[[Subject, str], None]]:
    """Register a function of (subject, family) as a check of `clause` for each of several families."""

    def register(run: Callable[[Subject, str], None]) -> Callable[[Subject, str], None]:
        for family in families:

            def of_family(subject: Subject, family: str = family) -> None:
                run(subject, family)

            check(clause, family)(update_wrapper(of_family, run))
        return run

    return register


def validate(checks: list[Check]) -> None:
    """Raise CheckError for a check of no clause, or a clause without a check."""
    known = all_clauses()
    for each in checks:
        if each.clause not in known:
            raise CheckError(f"check {each.name!r} names no clause of the specification: {each.clause}")
    unchecked = [clause for clause in known if clause not in {each.clause for each in checks if each.run}]
    if unchecked:
        raise CheckError(f"clauses without a check: {', '.join(unchecked)}")


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check, in the order of the modules, then the machines, validated. Raises CheckError."""
    for name in MODULES:
        import_module(f"kvref_conformance.checks.{name}")
    searches = [Check(clause, family, None) for family, clauses in SPEAKS_FOR.items() for clause in clauses]
    validate(_REGISTERED + searches)
    return tuple(_REGISTERED + searches)
