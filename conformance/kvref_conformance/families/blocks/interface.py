"""The typed protocol of the block pool."""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array

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


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self, *, num_blocks: int) -> Blocks: ...
