"""Interface of a block store with host blocks, and of the copies between the two."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.interface import Tokens

_BLOCKS = "ShapeMismatch SlotOutOfRange"
# The errors that the spec requires of each operation. The only error required of `new` is ConfigError.
ERRORS: dict[str, str] = {
    "write": "ShapeMismatch DtypeMismatch NonFinite SlotOutOfRange",
    "read": "SlotOutOfRange",
    "to_host": _BLOCKS,
    "to_device": _BLOCKS,
}


class Hosted(Protocol):
    """`write` quantizes block_size tokens of keys and values into a block, `read` returns what the block reads back as."""

    def write(self, block: int, keys: Tokens, values: Tokens) -> None: ...
    def read(self, block: int) -> tuple[Tokens, Tokens]: ...
    def to_host(self, blocks: Sequence[int], places: Sequence[int]) -> None: ...
    def to_device(self, places: Sequence[int], blocks: Sequence[int]) -> None: ...


class Factory(Protocol):
    """Creates a store. Every size is passed by name."""

    def __call__(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, format: str, capacity: int
    ) -> Hosted: ...
