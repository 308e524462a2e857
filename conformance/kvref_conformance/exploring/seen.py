"""The result of a unit of work, and the shape by which equal failures are recognized."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvref_conformance.conversation.exchange import Exchange
from kvref_conformance.exploring.units import Unit
from kvref_conformance.outcome import Outcome
from kvref_conformance.searching.found import Finding

Transition = tuple[str, str, str]
Shape = tuple[str, ...]  # the calls in order, as "paged.write", with a "!" if the call raised


@dataclass(frozen=True)
class Failed:
    """A shrunk failure, and the unit that found it first."""

    unit: Unit
    clause: str
    shape: Shape
    outcome: Outcome


@dataclass(frozen=True)
class Seen:
    """The result of a unit.

    calls: number of calls. taken: how many bytes of the seed were used, None if unknown. states, transitions: those reached.
    found: an unshrunk failure. failed: a failure that is shrunk already. through: the derived operations that were used.
    """

    unit: Unit
    calls: int
    taken: int | None = None
    states: frozenset[str] = frozenset()
    transitions: frozenset[Transition] = frozenset()
    found: Finding | None = None
    through: Sequence[str] = field(default=())
    failed: Failed | None = None


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
