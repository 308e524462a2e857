"""The family `windowed`: a cache that stores the newest tokens and the sink tokens."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES, OF_SAVED_CACHES
from kvref_conformance.implementation_api import Query, Saved, Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS, SCALED_FORMATS, group_of
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

SMALL = {"num_kv_heads": 2, "head_dim": 5, "window": 7, "sinks": 0, "chunk": 0, "rollback": 0, "dtype": "float32"}

FAMILY = Family(
    name="windowed",
    chapter="windows",
    small=SMALL,
    speaks_for=(*OF_CACHES, *(f"WIN-{n:02}" for n in range(1, 8)), "WIN-10", "EDIT-02", "ATTN-07", *OF_SAVED_CACHES),
    gives={"save": "data"},
    formats={"dtype": (*PLAIN_FORMATS, *SCALED_FORMATS)},
    fits=lambda config: config["head_dim"] % group_of(config["dtype"]) == 0,
    may_be_zero=("sinks", "chunk", "rollback"),
    appending={"append": ("keys", "values"), "step": ("query", "keys", "values")},
)


# The typed protocol of the windowed cache.

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


class WindowedFactory(Protocol):
    """The factory. It receives every size by name. `chunk` is 0 for no chunks."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, window: int, sinks: int, chunk: int, rollback: int, dtype: str
    ) -> Windowed: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    query = counting_rows(2, sizes.heads, sizes.dim)
    return {
        **on_family("windowed", {
            "append": args(keys=tokens, values=tokens), "step": args(query=query, keys=tokens, values=tokens, scale=1.0),
            "length": args(), "stored_tokens": args(), "read": args(positions=[1]), "attend": args(query=query, scale=1.0),
            "truncate": args(length=1), "save": args(),
            "load": args(data=lambda got: got["windowed.save"]), "clear": args(),
        }),
    }  # fmt: skip
