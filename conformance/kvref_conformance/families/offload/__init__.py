"""Bookkeeping of a host store: which keys are stored, being stored, being loaded or evicted."""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, on_family

FAMILY = Family(
    name="offload",
    chapter="moving",
    small={"capacity": 4},
    speaks_for=("LAW-01", "LAW-12", "MOVE-06", "MOVE-08", "MOVE-09", "MOVE-10", "MOVE-11"),
    may_be_zero=("capacity",),
)


# Interface of the bookkeeping of a host store.
#
# A store or a load takes two calls, `prepare_...` and `complete_...`. The caller copies the blocks between the two.

# The errors that the spec requires of each operation. The only error required of `new` is ConfigError.
ERRORS: dict[str, str] = {
    "places": "KeyNotFound",
    "prepare_store": "OutOfBlocks",
    "complete_store": "KeyNotFound",
    "prepare_load": "KeyNotFound",
    "complete_load": "KeyNotFound",
}


class Offload(Protocol):
    """A key is an integer of 64 bits, such as a hash. `prepare_store` returns the keys to be stored and the keys that were
    evicted for them. `places` returns the place of each key's block, in [0, capacity), also while the block is being stored.
    """

    capacity: int
    num_free: int

    def lookup(self, keys: Sequence[int]) -> int: ...
    def places(self, keys: Sequence[int]) -> Sequence[int] | Array: ...
    def prepare_store(self, keys: Sequence[int]) -> tuple[Sequence[int] | Array, Sequence[int] | Array]: ...
    def complete_store(self, keys: Sequence[int], success: bool = True) -> None: ...
    def prepare_load(self, keys: Sequence[int]) -> None: ...
    def complete_load(self, keys: Sequence[int]) -> None: ...
    def touch(self, keys: Sequence[int]) -> None: ...


class OffloadFactory(Protocol):
    """Creates a store. Every size is passed by name."""

    def __call__(self, *, capacity: int) -> Offload: ...


# One call of each operation.


def sample_calls(sizes: Sizes) -> SampleCalls:
    key = [3]
    return on_family("offload", {
        "capacity": args(), "num_free": args(), "prepare_store": args(keys=key),
        "complete_store": args(keys=key), "lookup": args(keys=key),
        "places": args(keys=key), "touch": args(keys=key), "prepare_load": args(keys=key), "complete_load": args(keys=key),
    })  # fmt: skip
