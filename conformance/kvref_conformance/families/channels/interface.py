"""The typed protocol of the cache that quantizes keys per channel."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.interface import Query, Tokens

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": "ShapeMismatch DtypeMismatch NonFinite CapacityExceeded",
    "read": "PositionOutOfRange",
    "attend": "ShapeMismatch DtypeMismatch",
    "truncate": "PositionOutOfRange NotTruncatable",
}


class Channels(Protocol):
    """`format` is an affine format of FMT-GROUP. `dtype` is the dtype of the tokens that are not quantized.

    `quantized_keys` and `quantized_values` are how many tokens have quantized keys, or values.
    """

    length: int
    quantized_keys: int
    quantized_values: int
    memory_bytes: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def attend(self, query: Query, scale: float) -> Query: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, max_tokens: int, residual: int, format: str, dtype: str, rollback: int
    ) -> Channels: ...
