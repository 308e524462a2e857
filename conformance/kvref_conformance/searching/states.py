"""What a state worth meeting is: one that bugs hide behind. a file a family says which, `met` counts them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvref_conformance.arrays import NDArray
from kvref_conformance.families import all_families
from kvref_conformance.oracle.model import Model


@dataclass
class Past:
    """What the calls before left to be remembered: `met` the states, the rest as each family's states say."""

    met: set[str] = field(default_factory=set)
    made: dict[int, dict[str, Any]] = field(default_factory=dict)  # the sizes of each object
    most: dict[int, int] = field(default_factory=dict)  # tokens that each object held when it last forgot everything
    given_back: set[int] = field(default_factory=set)  # blocks that held tokens of a sequence, or were somebody's
    takers: list[int] = field(default_factory=list)  # sequences that took blocks, in order
    buffers: dict[int, int] = field(default_factory=dict)  # by size class, the most values a buffer had when it was released
    used_again: set[int] = field(default_factory=set)  # buffers whose memory was somebody's before


@dataclass(frozen=True)
class Call:
    """A call that was answered as it must be. model, models: as they were before it, of its object and of all."""

    id: int
    op: str
    on: int
    args: dict[str, Any]
    ok: Any
    raised: str  # the error's kind, or nothing
    models: dict[int, Model]
    past: Past

    @property
    def model(self) -> Any:
        return self.models[self.on]

    @property
    def tokens(self) -> int:
        """How many it hands in: where the axis lies is the family's business."""
        family = all_families().get(self.op.partition(".")[0])  # a buffer is none, and its values have one axis
        axis = family.token_axis if family else -1
        array: NDArray = next(self.args[name] for name in ("key_values", "values", "rope") if name in self.args)
        return int(array.shape[axis])


State = Callable[[Call], bool]


@dataclass(frozen=True)
class Watched:
    """A state of a family: met by a call to one of the operations, answered so, of which `holds` is true."""

    ops: tuple[str, ...]
    raising: str
    holds: State


STATES: dict[str, dict[str, Watched]] = {}
NOTES: dict[str, Callable[[Call], None]] = {}  # what each family remembers of a call


def state(family: str, *ops: str, raising: str = "") -> Callable[[State], State]:
    """A state is called like the function that knows it, which is asked about calls that went well or raised this."""

    def register(holds: State) -> State:
        full = tuple(op if "." in op else f"{family}.{op}" for op in ops)
        STATES.setdefault(family, {})[holds.__name__.replace("_", " ")] = Watched(full, raising, holds)
        return holds

    return register


def refusals(family: str, *kinds: str) -> None:
    """Being refused in each of these ways is a state of the family too."""
    for kind in kinds:
        STATES.setdefault(family, {})[f"{kind} is raised"] = Watched((), kind, lambda call: True)
