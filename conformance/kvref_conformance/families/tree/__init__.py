"""The family `tree`: its record, its operations and one sample call of each."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Query, Tokens
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="tree",
    chapter="tree",
    small={"num_blocks": 24, "num_kv_heads": 2, "head_dim": 5, "block_size": 4},
    speaks_for=(*OF_CACHES, *(f"TREE-{n:02}" for n in range(1, 13))),
    gives={"create": "sequence", "fork": "sequence"},
    may_be_zero=("num_blocks",),
    appending={"append": ("keys", "values")},
)

# The errors that the specification requires of each operation. The factory raises ConfigError.
ERRORS: dict[str, str] = {
    "fork": "SequenceNotFound InUse OutOfBlocks",
    "drop": "SequenceNotFound",
    "length": "SequenceNotFound",
    "append": "SequenceNotFound InUse ShapeMismatch DtypeMismatch NonFinite OutOfBlocks",
    "truncate": "SequenceNotFound InUse PositionOutOfRange",
    "read": "SequenceNotFound",
    "draft": "SequenceNotFound ShapeMismatch DtypeMismatch NonFinite PositionOutOfRange OutOfBlocks",
    "positions": "SequenceNotFound",
    "ancestors": "SequenceNotFound PositionOutOfRange",
    "attend": "SequenceNotFound ShapeMismatch DtypeMismatch PositionOutOfRange",
    "accept": "SequenceNotFound PositionOutOfRange",
    "reject": "SequenceNotFound",
}


class Tree(Protocol):
    """The operations of a cache. An implementation may lack some. The parent or node -1 is the last committed token."""

    num_free_blocks: int

    def create(self) -> int: ...
    def fork(self, sequence: int) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def append(self, sequence: int, keys: Tokens, values: Tokens) -> None: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def read(self, sequence: int) -> tuple[Tokens, Tokens]: ...
    def draft(self, sequence: int, keys: Tokens, values: Tokens, parents: Sequence[int]) -> Sequence[int] | Array: ...
    def positions(self, sequence: int) -> Sequence[int] | Array: ...
    def ancestors(self, sequence: int, node: int) -> Sequence[int] | Array: ...
    def attend(self, sequence: int, nodes: Sequence[int], query: Query, scale: float | None = None) -> Query: ...
    def accept(self, sequence: int, node: int) -> None: ...
    def reject(self, sequence: int) -> None: ...


class TreeFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(self, *, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int) -> Tree: ...


def sequence(got: ResultByName) -> Any:
    return got["tree.create"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    calls = {
        "create": args(), "num_free_blocks": args(), "append": args(sequence=sequence, keys=tokens, values=tokens),
        "length": args(sequence=sequence), "read": args(sequence=sequence), "fork": args(sequence=sequence),
        "draft": args(sequence=sequence, keys=tokens, values=tokens, parents=[-1, 0]), "positions": args(sequence=sequence),
        "ancestors": args(sequence=sequence, node=1), "attend": args(sequence=sequence, nodes=[0], query=tokens[:1]),
        "accept": args(sequence=sequence, node=0), "reject": args(sequence=sequence),
        "truncate": args(sequence=sequence, length=1), "drop": args(sequence=sequence),
    }  # fmt: skip
    return on_family("tree", calls)
