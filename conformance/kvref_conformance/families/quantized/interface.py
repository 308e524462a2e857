"""The typed protocol of the quantized cache."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.interface import HeadRow, Query, Saved, Step, Token, Tokens

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": f"LayerOutOfRange {_TOKENS} CapacityExceeded",
    "append_step": f"{_TOKENS} CapacityExceeded",
    "read_head": "LayerOutOfRange PositionOutOfRange HeadOutOfRange",
    "read_token": "LayerOutOfRange PositionOutOfRange",
    "read_tokens": "LayerOutOfRange PositionOutOfRange",
    "length": "LayerOutOfRange",
    "truncate": "PositionOutOfRange",
    "load": "FileDamaged ConfigError CapacityExceeded",
    "attend": "LayerOutOfRange ShapeMismatch DtypeMismatch",
}


class Quantized(Protocol):
    memory_bytes: int
    fp32_bytes: int
    compression_ratio: float

    def append(self, layer: int, keys: Tokens, values: Tokens) -> None: ...
    def append_step(self, keys: Step, values: Step) -> None: ...
    def read_head(self, layer: int, position: int, head: int) -> tuple[HeadRow, HeadRow]: ...
    def read_token(self, layer: int, position: int) -> tuple[Token, Token]: ...
    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def length(self, layer: int) -> int: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def save(self) -> Saved: ...
    def load(self, data: Saved) -> None: ...
    def attend(self, layer: int, query: Query, scale: float) -> Query: ...


class Factory(Protocol):
    """The factory. It receives every size by name, and the scales in the formats of FMT-STATIC only."""

    def __call__(
        self,
        *,
        num_layers: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        format: str,
        key_scale: float | None = None,
        value_scale: float | None = None,
    ) -> Quantized: ...
