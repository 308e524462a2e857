"""Interface of the sharded cache: one sequence on several ranks."""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array
from kvref_conformance.interface import Query, Tokens

_RANK = "RankOutOfRange RankLost"
# The errors that the spec requires of each operation. The only error required of `new` is ConfigError.
ERRORS: dict[str, str] = {
    "append": "ShapeMismatch DtypeMismatch NonFinite CapacityExceeded RankLost",
    "read": "RankLost",
    "read_rank": _RANK,
    "heads": _RANK,
    "positions": _RANK,
    "block_table": _RANK,
    "num_bytes": _RANK,
    "attend": "ShapeMismatch DtypeMismatch PositionOutOfRange RankLost",
    "truncate": "PositionOutOfRange RankLost",
    "clear": "RankLost",
    "lose": _RANK,
    "lose_in_append": _RANK,
}


class Sharded(Protocol):
    """Rank r is in row r // token_ranks, of head_ranks rows, and in column r % token_ranks.

    `read_rank` returns the rank's `heads` at its `positions`, in the order of both. The queries of `attend` are those of the last
    tokens, and it is causal. `lose` makes a rank fail at once, `lose_in_append` during the next append of at least one token.
    """

    length: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def read_rank(self, rank: int) -> tuple[Tokens, Tokens]: ...
    def heads(self, rank: int) -> Sequence[int] | Array: ...
    def positions(self, rank: int) -> Sequence[int] | Array: ...
    def block_table(self, rank: int) -> Sequence[int] | Array: ...
    def num_bytes(self, rank: int) -> int: ...
    def attend(self, query: Query, scale: float) -> Query: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def lose(self, rank: int) -> None: ...
    def lose_in_append(self, rank: int) -> None: ...


class Factory(Protocol):
    """Creates a cache. Every size is passed by name. num_blocks is the number of blocks per rank."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, head_ranks: int, token_ranks: int, block_size: int, num_blocks: int, dtype: str
    ) -> Sharded: ...
