"""Units of work, (family, kind, seed), and the bytes that the seed of a call sequence stands for."""

import random
from typing import Literal, NamedTuple

Kind = Literal["calls", "check", "soak"]
KINDS: tuple[Kind, ...] = "calls", "check", "soak"
LENGTH = 4096  # bytes that determine a call sequence, of which a few hundred are used
USUAL = 300  # assumed number of used bytes if it is not known


class Unit(NamedTuple):
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
