"""Interface of the tiered cache."""

from typing import Any, Protocol

from kvref_conformance.interface import Query, Saved, Statistics, Tokens

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that the spec requires of each operation. The only error required of `new` is ConfigError.
ERRORS: dict[str, str] = {
    "append": _TOKENS,
    "tier_of": "PositionOutOfRange",
    "update_policy": "ConfigError NonFinite",
    "attend": "ShapeMismatch DtypeMismatch",
    "load": "FileDamaged ConfigError",
    "truncate": "PositionOutOfRange NotTruncatable",
}


class TieredStats(Statistics, Protocol):
    total_tokens: int
    tail_tokens: int
    warm_tokens: int
    store_tokens: int
    tail_bytes: int
    warm_bytes: int
    store_bytes: int
    compression_ratio: float


class Tiered(Protocol):
    """`update_policy` accepts all sizes and formats of `new` except num_kv_heads, head_dim and max_tokens."""

    total_tokens: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def tier_of(self, position: int) -> str: ...
    def stats(self) -> TieredStats: ...
    def update_policy(self, **changes: Any) -> None: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def save(self) -> Saved: ...
    def load(self, data: Saved) -> None: ...
    def attend(self, query: Query, scale: float) -> Query: ...


class Factory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, max_tokens: int, tail_length: int, tail_dtype: str, warm_length: int,
        warm_format: str, store_format: str, migration_batch: int,
    ) -> Tiered: ...  # fmt: skip
