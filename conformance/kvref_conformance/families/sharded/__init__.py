"""The sharded cache: one sequence, with heads and tokens divided among several ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Query, Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family


def goes(config: Any) -> bool:
    """Whether heads and rows of ranks divide evenly, one way or the other (SHARD-01)."""
    heads, rows = config["num_kv_heads"], config["head_ranks"]
    return bool(heads % rows == 0 or rows % heads == 0)


FAMILY = Family(
    name="sharded",
    chapter="sharded",
    small={
        "num_kv_heads": 2, "head_dim": 5, "head_ranks": 4, "token_ranks": 3, "block_size": 2, "num_blocks": 7, "dtype": "float32",
    },
    speaks_for=(*OF_CACHES, *(f"SHARD-{n:02}" for n in range(1, 5)), "EDIT-01", "EDIT-02"),
    formats={"dtype": PLAIN_FORMATS},
    goes=goes,
    appending={"append": ("keys", "values")},
)  # fmt: skip


# Interface of the sharded cache: one sequence on several ranks.

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


class ShardedFactory(Protocol):
    """Creates a cache. Every size is passed by name. num_blocks is the number of blocks per rank."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, head_ranks: int, token_ranks: int, block_size: int, num_blocks: int, dtype: str
    ) -> Sharded: ...


# One call of each operation.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens, query = counting_rows(2, sizes.heads, sizes.dim), counting_rows(1, sizes.heads, sizes.dim)
    last = sizes.config.get("head_ranks", 1) * sizes.config.get("token_ranks", 1) - 1
    return {
        **on_family("sharded", {
            "append": args(keys=tokens, values=tokens), "length": args(), "read": args(), "read_rank": args(rank=0),
            "heads": args(rank=last), "positions": args(rank=0), "block_table": args(rank=last), "num_bytes": args(rank=0),
            "attend": args(query=query, scale=1.0), "truncate": args(length=1),
            "clear": args(), "lose_in_append": args(rank=last),
            "lose": args(rank=0),
        }),
    }  # fmt: skip
