"""The typed protocol of the windowed cache."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.interface import Query, Saved, Tokens

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": _TOKENS,
    "step": _TOKENS,
    "attend": "ShapeMismatch DtypeMismatch PositionOutOfRange",
    "read": "PositionOutOfRange",
    "load": "FileDamaged ConfigError",
    "truncate": "PositionOutOfRange NotTruncatable",
}


class Windowed(Protocol):
    """The position of a token is the number of tokens before it, evicted ones included.

    `step` appends tokens and attends with one query per token. All queries of `attend` have the position of the newest token.
    """

    length: int
    stored_tokens: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def step(self, query: Query, keys: Tokens, values: Tokens, scale: float) -> Query: ...
    def attend(self, query: Query, scale: float) -> Query: ...
    def read(self, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def save(self) -> Saved: ...
    def load(self, data: Saved) -> None: ...


class Factory(Protocol):
    """The factory. It receives every size by name. `chunk` is 0 for no chunks."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, window: int, sinks: int, chunk: int, rollback: int, dtype: str
    ) -> Windowed: ...
