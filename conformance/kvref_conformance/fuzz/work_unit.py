"""Units of work, (family, kind, seed), and the bytes that the seed of a call sequence stands for."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvref_conformance.fuzz.findings import FuzzFailure
from kvref_conformance.results import CheckResult
from kvref_conformance.traces.shape import Shape

Kind = Literal["calls", "check", "soak"]
KINDS: tuple[Kind, ...] = "calls", "check", "soak"
SEED_BYTES = 4096  # bytes that determine a call sequence, of which a few hundred are used
USUAL_BYTES = 300  # assumed number of used bytes if it is not known


class WorkUnit(NamedTuple):
    """A unit of work. kind: "calls", one call sequence of a state machine; "check", one check; "soak", one short soak.

    seed: a number; for "calls" also "17+40:5", which means the bytes [0, 40) of seed 17 and then the bytes of seed 5. Further
    parts may follow, at increasing positions: "17+40:5+96:8".
    """

    family: str
    kind: Kind
    seed: str

    def __str__(self) -> str:
        return f"{self.family} {self.kind} {self.seed}"


def neighbor_seed(seed: str, at: int, other: int) -> str:
    """A seed with the same first `at` bytes as `seed`, and then the bytes of the seed `other`."""
    first, *parts = seed.split("+")
    return "+".join([first, *(part for part in parts if int(part.partition(":")[0]) < at), f"{at}:{other}"])


def seed_bytes(seed: str) -> bytes:
    """The SEED_BYTES bytes of a seed of kind "calls". Raises ValueError if it is malformed."""
    first, *parts = seed.split("+")
    found = _random_bytes(int(first))
    for part in parts:
        at, _, other = part.partition(":")
        if not 0 <= int(at) < SEED_BYTES:
            raise ValueError(f"expected a position in [0, {SEED_BYTES}), got {at}")
        found = (found[: int(at)] + _random_bytes(int(other)))[:SEED_BYTES]
    return found


def _random_bytes(seed: int) -> bytes:
    return random.Random(seed).randbytes(SEED_BYTES)


# The result of a unit of work.

Transition = tuple[str, str, str]


@dataclass(frozen=True)
class UnitFailure:
    """A shrunk failure, and the unit that found it first."""

    unit: WorkUnit
    clause: str
    shape: Shape
    outcome: CheckResult


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit.

    calls: number of calls. bytes_used: how many bytes of the seed were used, None if unknown. states, transitions: those reached.
    fuzz_failure: an unshrunk failure. failure: a failure that is shrunk already. derivations_used: the derived operations that
    were used.
    """

    unit: WorkUnit
    calls: int
    bytes_used: int | None = None
    states: frozenset[str] = frozenset()
    transitions: frozenset[Transition] = frozenset()
    fuzz_failure: FuzzFailure | None = None
    derivations_used: Sequence[str] = field(default=())
    failure: UnitFailure | None = None
