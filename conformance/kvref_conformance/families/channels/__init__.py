"""The family `channels`: a cache that quantizes keys per channel, and stores its newest tokens unquantized."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Query, Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS, group_of
from kvref_conformance.oracle.formats.kivi import KIVI_FORMATS
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family


def fits(config: Any) -> bool:
    """Returns whether the residual and head_dim are multiples of the group."""
    group = group_of(config["format"])
    return bool(config["residual"] % group == 0 and config["head_dim"] % group == 0)


FAMILY = Family(
    name="channels",
    chapter="channels",
    small={
        "num_kv_heads": 2, "head_dim": 32, "max_tokens": 100, "residual": 64, "format": "uint4_g32_float16", "dtype": "float32",
        "rollback": 0,
    },
    speaks_for=(*OF_CACHES, "ATTN-10", *(f"KIVI-{n:02}" for n in (1, 2, 3, 5, 6, 7, 8)), "EDIT-02"),
    formats={"format": KIVI_FORMATS, "dtype": PLAIN_FORMATS},
    may_be_zero=("rollback",),
    fits=fits,
    appending={"append": ("keys", "values")},
)  # fmt: skip


# The typed protocol of the cache that quantizes keys per channel.

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": "ShapeMismatch DtypeMismatch NonFinite CapacityExceeded",
    "read": "PositionOutOfRange",
    "attend": "ShapeMismatch DtypeMismatch",
    "truncate": "PositionOutOfRange NotTruncatable",
}


class Channels(Protocol):
    """`format` is an affine format of FMT-GROUP. `dtype` is the dtype of the tokens that are not quantized.

    `quantized_keys` and `quantized_values` are how many tokens have quantized keys, or values. `attend` is not causal: each of
    its queries, of which all have the position of the newest token, sees every token.
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


class ChannelsFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_kv_heads: int, head_dim: int, max_tokens: int, residual: int, format: str, dtype: str, rollback: int
    ) -> Channels: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    dim = sizes.config.get("head_dim", 32)
    tokens, query = counting_rows(2, sizes.heads, dim), counting_rows(1, sizes.heads, dim)
    return {
        **on_family("channels", {
            "append": args(keys=tokens, values=tokens), "length": args(), "quantized_keys": args(), "quantized_values": args(),
            "memory_bytes": args(), "read": args(positions=[1, 0]),
            "attend": args(query=query, scale=1.0), "truncate": args(length=1),
            "clear": args(),
        }),
    }  # fmt: skip
