"""The family `pooled`: a cache whose blocks are stored in buffers of a pool."""

from typing import Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.buffers import Buffers, BufferStats
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Statistics, Tokens
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="pooled",
    chapter="pooled",
    small={"num_kv_heads": 2, "head_dim": 5, "tokens_per_block": 3, "max_tokens": 20},
    speaks_for=(*(law for law in OF_CACHES if law != "LAW-11"), *(f"POOL-{n:02}" for n in range(1, 7))),
    holds={"max_tokens": ("tokens_per_block",)},
    appending={"append": ("keys", "values")},
)


# The typed protocol of the pooled cache.

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


class PooledFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, tokens_per_block: int, max_tokens: int, pool: Buffers | None = None
    ) -> Pooled: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    return {
        **on_family("pooled", {
            "append": args(keys=tokens, values=tokens), "total_tokens": args(), "read": args(), "stats": args(), "clear": args(),
        }),
    }  # fmt: skip
