"""The typed protocol of the grouped cache."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from kvref.array import Array
from kvref_conformance.interface import Query, Tokens

TokenStep = Annotated[Array, "[num_layers, n, num_kv_heads, head_dim]"]

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
_LAYER = "SequenceNotFound LayerOutOfRange"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "drop": "SequenceNotFound",
    "fork": "SequenceNotFound",
    "truncate": "SequenceNotFound PositionOutOfRange NotTruncatable",
    "begin": "TokenOutOfRange",
    "commit": "SequenceNotFound TokenOutOfRange PositionOutOfRange TokenMismatch",
    "match": "TokenOutOfRange",
    "reset": "InUse",
    "step": f"SequenceNotFound {_TOKENS} OutOfBlocks",
    "read": f"{_LAYER} PositionOutOfRange",
    "attend": f"{_LAYER} PositionOutOfRange ShapeMismatch DtypeMismatch",
    "length": "SequenceNotFound",
    "block_table": _LAYER,
}


class Grouped(Protocol):
    """Layer i is in group i % num_groups. The layers of the last group see all tokens, the others the last `window` tokens.

    `step` appends tokens in every layer. The queries of `attend` are those of the last tokens, and it is causal. `block_table` is
    that of the layer's group, with -1 in the place of a freed block. `begin` creates a sequence with the cached prefix of the
    tokens, and allocates no block for the others. `commit` declares the tokens at the first positions of a sequence.
    """

    num_free_blocks: int

    def create(self) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def begin(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def commit(self, sequence: int, tokens: Sequence[int]) -> None: ...
    def match(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def reset(self) -> None: ...
    def step(self, sequence: int, keys: TokenStep, values: TokenStep) -> None: ...
    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def attend(self, sequence: int, layer: int, query: Query, scale: float) -> Query: ...
    def length(self, sequence: int) -> int: ...
    def block_table(self, sequence: int, layer: int) -> Sequence[int] | Array: ...


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_groups: int, window: int, num_kv_heads: int,
        head_dim: int, dtype: str,
    ) -> Grouped: ...  # fmt: skip
