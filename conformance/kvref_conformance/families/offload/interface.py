"""Interface of the bookkeeping of a host store.

A store or a load takes two calls, `prepare_...` and `complete_...`. The caller copies the blocks between the two.
"""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array

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


class Factory(Protocol):
    """Creates a store. Every size is passed by name."""

    def __call__(self, *, capacity: int) -> Offload: ...
