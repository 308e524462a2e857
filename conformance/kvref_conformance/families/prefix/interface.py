"""The typed protocol of the prefix cache: the operations of a paged cache, and begin, commit, match and reset."""

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
    """The factory. It receives every size by name, and the scales in the formats of FMT-STATIC only."""

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
