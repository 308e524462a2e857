"""The family `blocks`: the block pool."""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.pool_adapters import SettlingAdapter
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, on_family

FAMILY = Family(
    name="blocks",
    chapter="blocks",
    small={"num_blocks": 5},
    speaks_for=("LAW-03", "LAW-11", "LAW-12", *(f"BLOCK-{n:02}" for n in range(1, 8)), "SHARE-01", "SHARE-02"),
    gives={"allocate": "block"},
    may_be_zero=("num_blocks",),
    counted_as={"settle": SettlingAdapter},
)


# The typed protocol of the block pool.

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "allocate": "OutOfBlocks",
    "allocate_many": "OutOfBlocks PositionOutOfRange",
    "share": "BlockNotAllocated",
    "free": "BlockNotAllocated",
    "references": "BlockNotAllocated",
}


class Blocks(Protocol):
    num_blocks: int
    num_free: int
    num_used: int
    utilization: float

    def allocate(self) -> int: ...
    def allocate_many(self, count: int) -> Sequence[int] | Array: ...
    def share(self, block: int) -> None: ...
    def free(self, block: int) -> None: ...
    def references(self, block: int) -> int: ...


class BlocksFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self, *, num_blocks: int) -> Blocks: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    return {
        **on_family("blocks", {
            "num_blocks": args(), "num_free": args(), "num_used": args(), "utilization": args(), "allocate": args(),
            "allocate_many": args(count=1), "share": args(block=lambda got: got["blocks.allocate"]),
            "references": args(block=0), "free": args(block=lambda got: got["blocks.allocate"]),
        }),
    }  # fmt: skip
