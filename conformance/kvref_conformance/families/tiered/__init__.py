"""The tiered cache: recent tokens in a plain dtype, older tokens in quantized formats."""

from typing import Any, Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES, OF_SAVED_CACHES
from kvref_conformance.implementation_api import Query, Saved, Statistics, Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS, SCALED_FORMATS, group_of
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

SMALL = {
    "num_kv_heads": 2, "head_dim": 5, "max_tokens": 20, "tail_length": 4, "tail_dtype": "float16", "warm_length": 0,
    "warm_format": "q8", "store_format": "q4", "migration_batch": 3,
}  # fmt: skip
EDITS = ("EDIT-01", "EDIT-02", "EDIT-06")

FAMILY = Family(
    name="tiered",
    chapter="tiered",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        "ATTN-10",
        *(f"TIER-{n:02}" for n in (1, 2, 3, 5, 6, 7, 8, 10, 13, 14, 17, 18)),
        *EDITS,
        *OF_SAVED_CACHES,
        "MOVE-02",
        "MOVE-03",
    ),
    gives={"save": "data"},
    formats={"tail_dtype": PLAIN_FORMATS, "warm_format": SCALED_FORMATS, "store_format": SCALED_FORMATS},
    fits=lambda config: all(config["head_dim"] % group_of(config[name]) == 0 for name in ("warm_format", "store_format")),
    may_be_zero=("tail_length", "warm_length"),
    holds={"max_tokens": ("tail_length", "warm_length")},
    appending={"append": ("keys", "values")},
)


# Interface of the tiered cache.

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
    """`update_policy` accepts all sizes and formats of `new` except num_kv_heads, head_dim and max_tokens. `attend` is not
    causal: each of its queries, of which all have the position of the newest token, sees every token.
    """

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


class TieredFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, max_tokens: int, tail_length: int, tail_dtype: str, warm_length: int,
        warm_format: str, store_format: str, migration_batch: int,
    ) -> Tiered: ...  # fmt: skip


# One call of each operation.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    query = counting_rows(1, sizes.heads, sizes.dim)
    return {
        **on_family("tiered", {
            "append": args(keys=tokens, values=tokens), "total_tokens": args(), "read": args(), "tier_of": args(position=0),
            "stats": args(), "attend": args(query=query, scale=1.0), "update_policy": args(tail_length=2),
            "truncate": args(length=1), "save": args(),
            "load": args(data=lambda got: got["tiered.save"]), "clear": args(),
        }),
    }  # fmt: skip
