"""The typed protocol of the pooled cache."""

from typing import Protocol

from kvref_conformance.families.buffers.interface import Buffers, BufferStats
from kvref_conformance.interface import Statistics, Tokens

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": f"{_TOKENS} BufferTooLarge",
}


class PooledStats(Statistics, Protocol):
    total_tokens: int
    num_blocks: int
    tokens_per_block: int
    bytes: int
    pool: BufferStats


class Pooled(Protocol):
    """`pool`, if it is passed, is an object that `buffers.new` created."""

    total_tokens: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def clear(self) -> None: ...
    def stats(self) -> PooledStats: ...


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, tokens_per_block: int, max_tokens: int, pool: Buffers | None = None
    ) -> Pooled: ...
