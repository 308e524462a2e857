"""What came of a unit, and what makes two failures the same."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvref_conformance.conversation.exchange import Exchange
from kvref_conformance.exploring.units import Unit
from kvref_conformance.outcome import Outcome
from kvref_conformance.searching.found import Finding

Transition = tuple[str, str, str]
Shape = tuple[str, ...]  # calls, one after the other: "paged.write", and with a "!" one that raises


@dataclass(frozen=True)
class Failed:
    """A failure as short as it could be made, and the unit that met it first."""

    unit: Unit
    clause: str
    shape: Shape
    outcome: Outcome


@dataclass(frozen=True)
class Seen:
    """calls: made of the implementation. taken: bytes of the seed, None where that is not known.

    found: by a machine or a check, as met. failed: what needs not be made shorter any more.
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
    """The calls of a trace, and which of them raise; numbers are left out."""
    messages = [json.loads(line) for line in trace[1:]]
    return tuple(
        called(request["op"], "error" in reply.get("got", reply))
        for request, reply in zip(messages[::2], messages[1::2], strict=True)
    )


def shape_as_met(conversation: Iterable[Exchange]) -> Shape:
    """The same of a conversation, with all that was only looked at."""
    return tuple(called(each.request.op, each.reply is not None and each.reply.error is not None) for each in conversation)


def called(op: str, raised: bool) -> str:
    return f"{op}!" if raised else op


def within(short: Shape, long: Shape) -> bool:
    """Whether the calls of one are made in the other, in this order, with any others between them."""
    left = iter(long)
    return all(call in left for call in short)
