"""Derived operations of engines.

`generate` equals repeated steps, and `step` equals generating one token in each session (ENG-02).
`sample` equals generating in n forks of the session (ENG-08).
"""

from collections.abc import Sequence
from functools import partial

from kvref_conformance.calls.derived_operations import DerivedOperation, call_in_order
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered


def generate_by_steps(engine: ObjectProxy, session: int, count: int) -> list[int]:
    if count < 1:
        raise NotOffered("generate of 0 tokens (derived from step)")
    output = list[int]()
    call_in_order(lambda: output.extend(engine.step([session])) for _ in range(count))
    return output


def step_by_generating(engine: ObjectProxy, sessions: Sequence[int]) -> list[int]:
    output = list[int]()

    def generate_one(session: int) -> None:
        output.extend(engine.generate(session, 1))

    call_in_order(partial(generate_one, session) for session in sessions)
    if len(output) < len(sessions):
        raise NotOffered("step at the end of a context (derived from generate, which returned fewer tokens)")
    return output


def sample_by_forks(engine: ObjectProxy, session: int, n: int, count: int) -> list[int]:
    output = list[int]()
    for _ in range(n):
        child = engine.fork(session)
        output += engine.generate(child, count)
        engine.close(child)
    return output


DERIVED = (
    DerivedOperation("generate", "ENG-02", ("step",), generate_by_steps),
    DerivedOperation("step", "ENG-02", ("generate",), step_by_generating),
    DerivedOperation("sample", "ENG-08", ("fork", "generate", "close"), sample_by_forks),
)
