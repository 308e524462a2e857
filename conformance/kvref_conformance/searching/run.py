"""Runs a family's machine over an implementation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import get_state_machine_test, run_state_machine_as_test

from kvref_conformance.families import all_families
from kvref_conformance.searching.found import Search
from kvref_conformance.searching.machine import Machine, Violation


def searched() -> list[str]:
    """The families that have a machine."""
    return [family.name for family in all_families().values() if family.machine]


def run_machine(family: str, search: Search, number: int, examples: int, steps: int) -> None:
    """Fill `search` with what is found in so many sequences of so many calls at most; `number` seeds them."""
    own: type[Machine] = all_families()[family].machine
    machine = seed(number)(type(own.__name__, (own,), {"search": search}))
    phases = (Phase.generate, Phase.shrink)
    quiet = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, phases=phases,
        verbosity=Verbosity.quiet, print_blob=False, suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    # Hypothesis also draws numbers that it finds written in the modules around, so that the same seed would not give the same.
    constants = _doing_nothing(HypothesisProvider, "_maybe_draw_constant")
    # Five of six sequences would be the one before with a part of it repeated, which hardly ever meets anything new.
    variations = _doing_nothing(ConjectureRunner, "generate_mutations_from")
    try:
        with np.errstate(all="ignore"), constants, variations:
            run_state_machine_as_test(machine, settings=quiet)
    except (Violation, Flaky):
        pass  # the search has noted what there is, and stopped where it had seen enough
    except ExceptionGroup as several:
        if several.split(Violation)[1]:
            raise


def run_bytes(family: str, search: Search, drawn: bytes, steps: int) -> int | None:
    """One sequence of so many calls at most, chosen by the bytes: the same calls for the same bytes, and for the same first bytes
    the same first calls. Returns how many bytes it took, or None where it ended before its time, as with a failure.
    """
    machine, fuzz = _by_bytes(family, steps)
    machine.search = search
    try:
        with np.errstate(all="ignore"):
            taken = fuzz(drawn)
    except Violation:
        return None  # the search has noted what there is
    return None if taken is None else len(taken)


@cache
def _by_bytes(family: str, steps: int) -> tuple[type[Machine], Callable[[bytes], bytes | None]]:
    """A machine, of which one runs at a time, and what runs it: made once, for that takes as long as some sequences."""
    own: type[Machine] = all_families()[family].machine
    machine = type(own.__name__, (own,), {})
    quiet = settings(
        stateful_step_count=steps, deadline=None, database=None, verbosity=Verbosity.quiet, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    test: Any = get_state_machine_test(machine, settings=quiet)
    return machine, test.hypothesis.fuzz_one_input


@contextmanager
def _doing_nothing(kind: type, name: str) -> Iterator[None]:
    """Inside the block a method does nothing, whether there is one or not. unittest.mock could do it, and is slow to import."""
    before: dict[str, Any] = {name: vars(kind)[name]} if name in vars(kind) else {}
    setattr(kind, name, lambda *_, **__: None)
    try:
        yield
    finally:
        delattr(kind, name)
        for method in before.values():
            setattr(kind, name, method)
