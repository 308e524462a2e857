"""A unit of work, (family, kind, seed), and the bytes that a seed of calls stands for."""

import random
from typing import Literal, NamedTuple

Kind = Literal["calls", "check", "soak"]
KINDS: tuple[Kind, ...] = "calls", "check", "soak"
LENGTH = 4096  # bytes that choose the calls of a sequence: some hundreds are used
USUAL = 300  # bytes that a sequence takes of which it is not known


class Unit(NamedTuple):
    """kind: "calls", one sequence of a machine's; "check", one of `kvref check`; "soak", a short one.

    seed: of the other kinds a number. Of calls "17", or "17+40:5" for what begins as 17 does and from byte 40 on is chosen as 5
    is from its beginning; and so on, "17+40:5+96:8", each part behind the one before.
    """

    family: str
    kind: Kind
    seed: str

    def __str__(self) -> str:
        return f"{self.family} {self.kind} {self.seed}"


def neighbour(seed: str, at: int, other: int) -> str:
    """What begins as `seed` does and goes on differently from byte `at`."""
    first, *parts = seed.split("+")
    return "+".join([first, *(part for part in parts if int(part.partition(":")[0]) < at), f"{at}:{other}"])


def drawn(seed: str) -> bytes:
    """The LENGTH bytes of a seed of calls. Raises ValueError for what is none."""
    first, *parts = seed.split("+")
    found = _stream(int(first))
    for part in parts:
        at, _, other = part.partition(":")
        if not 0 <= int(at) < LENGTH:
            raise ValueError(f"expected a place among {LENGTH} bytes, got {at}")
        found = (found[: int(at)] + _stream(int(other)))[:LENGTH]
    return found


def _stream(seed: int) -> bytes:
    return random.Random(seed).randbytes(LENGTH)
