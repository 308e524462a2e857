"""Runs the state machine of a family on an implementation, with Hypothesis."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import get_state_machine_test, run_state_machine_as_test

from kvref_conformance.exceptions import CannotRun
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.base_machine import FamilyStateMachine, Violation
from kvref_conformance.fuzz.findings import Search

TESTED_VERSIONS = "6.132 to 6.170"  # the versions of Hypothesis in which the private methods below were found


def families_with_machine() -> list[str]:
    """The families that have a state machine."""
    return [family.name for family in all_families().values() if family.state_machine]


def run_machine(family: str, search: Search, number: int, examples: int, steps: int) -> None:
    """Try at most `examples` call sequences of at most `steps` calls each, and add findings to `search`. number: the seed."""
    own: type[FamilyStateMachine] = all_families()[family].state_machine
    machine = seed(number)(type(own.__name__, (own,), {"search": search}))
    phases = (Phase.generate, Phase.shrink)
    quiet = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, phases=phases,
        verbosity=Verbosity.quiet, print_blob=False, suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    # Hypothesis also draws constants that it finds in loaded modules. Then the same seed would not make the same calls.
    constants = _without_method(HypothesisProvider, "_maybe_draw_constant")
    # Five of six call sequences would repeat parts of the previous one, which hardly ever reaches new states.
    variations = _without_method(ConjectureRunner, "generate_mutations_from")
    try:
        with np.errstate(all="ignore"), constants, variations, _without_time_limit():
            run_state_machine_as_test(machine, settings=quiet)
    except (Violation, Flaky):
        pass  # `search` has the findings; with enough of them, the later runs make no calls and look flaky
    except ExceptionGroup as several:
        if several.split(Violation)[1]:
            raise


def run_bytes(family: str, search: Search, drawn: bytes, steps: int) -> int | None:
    """Make one call sequence of at most `steps` calls, determined by the bytes `drawn`. Equal first bytes make equal first calls.

    Returns the number of bytes used, or None if the sequence ended early, for example by a failure.
    """
    machine, fuzz = _bytes_runner(family, steps)
    machine.search = search
    try:
        with np.errstate(all="ignore"):
            taken = fuzz(drawn)
    except Violation:
        return None  # `search` has the finding
    return None if taken is None else len(taken)


@cache
def _bytes_runner(family: str, steps: int) -> tuple[type[FamilyStateMachine], Callable[[bytes], bytes | None]]:
    """A state machine class, and the function that runs it on bytes. Cached, because making them takes as long as some sequences.

    Only one search may use them at a time.
    """
    own: type[FamilyStateMachine] = all_families()[family].state_machine
    machine = type(own.__name__, (own,), {})
    quiet = settings(
        stateful_step_count=steps, deadline=None, database=None, verbosity=Verbosity.quiet, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    test: Any = get_state_machine_test(machine, settings=quiet)
    return machine, test.hypothesis.fuzz_one_input


@contextmanager
def _without_time_limit() -> Iterator[None]:
    """Let Hypothesis make new call sequences for as long as it would within the first seconds after a failure.

    Hypothesis changes to shrinking 10 seconds after the first failure. On a busy machine this would be after fewer call
    sequences, and the same seed would find other failures. `Search.begin_sequence` ends the run after a number of calls.
    """
    time_of_failure = "first_bug_found_time"
    setattr(ConjectureRunner, time_of_failure, property(lambda runner: math.inf, lambda runner, seconds: None))
    try:
        yield
    finally:
        delattr(ConjectureRunner, time_of_failure)


@contextmanager
def _without_method(kind: type, name: str) -> Iterator[None]:
    """Replace a private method of Hypothesis by one that does nothing while the block runs.

    (unittest.mock can do this too, but is slow to import.) Raises CannotRun if this version of Hypothesis lacks the method.
    """
    before = vars(kind).get(name)
    if before is None:
        missing = f"hypothesis {version('hypothesis')} has no {kind.__name__}.{name}"
        raise CannotRun(f"{missing}: install a version that kvref was tried with, {TESTED_VERSIONS}")
    setattr(kind, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(kind, name, before)
