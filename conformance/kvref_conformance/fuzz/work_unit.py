"""Units of work, (family, kind, seed), and the bytes that the seed of a call sequence stands for."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.fuzz.findings import FuzzFailure
from kvref_conformance.outcome import CheckResult

Kind = Literal["calls", "check", "soak"]
KINDS: tuple[Kind, ...] = "calls", "check", "soak"
LENGTH = 4096  # bytes that determine a call sequence, of which a few hundred are used
USUAL = 300  # assumed number of used bytes if it is not known


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


def neighbour(seed: str, at: int, other: int) -> str:
    """A seed with the same first `at` bytes as `seed`, and then the bytes of the seed `other`."""
    first, *parts = seed.split("+")
    return "+".join([first, *(part for part in parts if int(part.partition(":")[0]) < at), f"{at}:{other}"])


def drawn(seed: str) -> bytes:
    """The LENGTH bytes of a seed of kind "calls". Raises ValueError if it is malformed."""
    first, *parts = seed.split("+")
    found = _stream(int(first))
    for part in parts:
        at, _, other = part.partition(":")
        if not 0 <= int(at) < LENGTH:
            raise ValueError(f"expected a position in [0, {LENGTH}), got {at}")
        found = (found[: int(at)] + _stream(int(other)))[:LENGTH]
    return found


def _stream(seed: int) -> bytes:
    return random.Random(seed).randbytes(LENGTH)


# The result of a unit of work, and the shape by which equal failures are recognized.

Transition = tuple[str, str, str]
Shape = tuple[str, ...]  # the calls in order, as "paged.write", with a "!" if the call raised


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

    calls: number of calls. taken: how many bytes of the seed were used, None if unknown. states, transitions: those reached.
    found: an unshrunk failure. failed: a failure that is shrunk already. through: the derived operations that were used.
    """

    unit: WorkUnit
    calls: int
    taken: int | None = None
    states: frozenset[str] = frozenset()
    transitions: frozenset[Transition] = frozenset()
    found: FuzzFailure | None = None
    through: Sequence[str] = field(default=())
    failed: UnitFailure | None = None


def shape_of(trace: Sequence[str]) -> Shape:
    """The shape of a trace: its calls and which of them raise, without their arguments."""
    messages = [json.loads(line) for line in trace[1:]]
    return tuple(
        called(request["op"], "error" in reply.get("got", reply))
        for request, reply in zip(messages[::2], messages[1::2], strict=True)
    )


def shape_as_met(conversation: Iterable[Exchange]) -> Shape:
    """The shape of recorded calls, including quiet ones."""
    return tuple(called(each.request.op, each.reply is not None and each.reply.error is not None) for each in conversation)


def called(op: str, raised: bool) -> str:
    return f"{op}!" if raised else op


def within(short: Shape, long: Shape) -> bool:
    """Whether `short` is a subsequence of `long`."""
    left = iter(long)
    return all(call in left for call in short)
