"""The paged cache that finds what it has seen: everything a paged cache has, and what is begun, committed, matched and reset."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.families.paged.interface import ERRORS as OF_PAGES
from kvref_conformance.families.paged.interface import Paged

ERRORS: dict[str, str] = OF_PAGES | {
    "begin": "TokenOutOfRange OutOfBlocks",
    "commit": "SequenceNotFound TokenOutOfRange PositionOutOfRange TokenMismatch",
    "match": "TokenOutOfRange",
    "reset": "InUse",
}


class Prefix(Paged, Protocol):
    """`begin` creates a sequence with the cached prefix of the tokens, and allocates blocks for all of them, or none. The length
    of the sequence is that of the prefix. `commit` declares the tokens at the first positions of a sequence.
    """

    def begin(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def commit(self, sequence: int, tokens: Sequence[int]) -> None: ...
    def match(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def reset(self) -> None: ...


class Factory(Protocol):
    """What makes one: it is given every size by name, and the scales in the formats of FMT-STATIC alone."""

    def __call__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        key_scale: float | None = None,
        value_scale: float | None = None,
    ) -> Prefix: ...
