"""Derived operations of engines.

`generate` equals repeated steps, and `step` equals generating one token in each session (ENG-02).
`sample` equals generating in n forks of the session (ENG-08).
"""

from collections.abc import Sequence
from functools import partial

from kvref_conformance.calls.derived_operations import DerivedOperation, in_turn
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.outcome import NotOffered


def step_by_step(engine: ObjectProxy, session: int, count: int) -> list[int]:
    if count < 1:
        raise NotOffered("generate of 0 tokens (derived from step)")
    said = list[int]()
    in_turn(lambda: said.extend(engine.step([session])) for _ in range(count))
    return said


def one_after_the_other(engine: ObjectProxy, sessions: Sequence[int]) -> list[int]:
    said = list[int]()

    def speak(session: int) -> None:
        said.extend(engine.generate(session, 1))

    in_turn(partial(speak, session) for session in sessions)
    if len(said) < len(sessions):
        raise NotOffered("step at the end of a context (derived from generate, which returned fewer tokens)")
    return said


def of_forks(engine: ObjectProxy, session: int, n: int, count: int) -> list[int]:
    said = list[int]()
    for _ in range(n):
        child = engine.fork(session)
        said += engine.generate(child, count)
        engine.close(child)
    return said


DERIVED = (
    DerivedOperation("generate", "ENG-02", ("step",), step_by_step),
    DerivedOperation("step", "ENG-02", ("generate",), one_after_the_other),
    DerivedOperation("sample", "ENG-08", ("fork", "generate", "close"), of_forks),
)
