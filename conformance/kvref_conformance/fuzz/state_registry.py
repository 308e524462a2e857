"""The registry of states that a state machine should reach, because bugs may show only there.

The states are registered in families/*/state_machine.py. `state_coverage` computes which of them a call trace reached.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.reference_model import ReferenceModel


@dataclass
class SequenceHistory:
    """What states need to know about earlier calls: the states that were reached, and facts that NOTES of a family add."""

    reached: set[str] = field(default_factory=set)
    configs: dict[int, dict[str, Any]] = field(default_factory=dict)  # the sizes of each object
    max_tokens: dict[int, int] = field(default_factory=dict)  # number of tokens in each object when it was last cleared
    freed_blocks: set[int] = field(default_factory=set)  # blocks that were allocated and then freed
    allocating_sequences: list[int] = field(default_factory=list)  # sequences that allocated blocks, in order
    buffer_sizes: dict[int, int] = field(default_factory=dict)  # by size class, the most values of a buffer when it was released
    reused_buffers: set[int] = field(default_factory=set)  # buffers whose memory belonged to another buffer before


@dataclass(frozen=True)
class ModelCall:
    """A call with a correct reply. models: the models of all objects before the call; model: that of its own object."""

    id: int
    op: str
    on: int
    args: dict[str, Any]
    result: Any
    error_kind: str  # the kind of the error, or ""
    models: dict[int, ReferenceModel]
    history: SequenceHistory

    @property
    def model(self) -> Any:
        return self.models[self.on]

    @property
    def tokens(self) -> int:
        """The number of tokens in its arguments."""
        family = all_families().get(self.op.partition(".")[0])  # None for a buffer, whose values have one axis
        axis = family.token_axis if family else -1
        array: NDArray = next(self.args[name] for name in ("key_values", "values", "rope") if name in self.args)
        return int(array.shape[axis])


StatePredicate = Callable[[ModelCall], bool]


@dataclass(frozen=True)
class StateTest:
    """A state, reached by a call of one of `ops` (any if empty) that raised `error_kind` ("": no error) and for which
    `predicate`.
    """

    ops: tuple[str, ...]
    error_kind: str
    predicate: StatePredicate


STATES: dict[str, dict[str, StateTest]] = {}
NOTES: dict[str, Callable[[ModelCall], None]] = {}  # per family, a function that adds facts about a call to its SequenceHistory


def state(family: str, *ops: str, raising: str = "") -> Callable[[StatePredicate], StatePredicate]:
    """Register a function as the test of a state, which has the name of the function."""

    def register(holds: StatePredicate) -> StatePredicate:
        full = tuple(op if "." in op else f"{family}.{op}" for op in ops)
        STATES.setdefault(family, {})[holds.__name__.replace("_", " ")] = StateTest(full, raising, holds)
        return holds

    return register


def register_error_states(family: str, *kinds: str) -> None:
    """Register a state for each kind of error, which a call reaches by raising it."""
    for kind in kinds:
        STATES.setdefault(family, {})[f"{kind} is raised"] = StateTest((), kind, lambda call: True)
