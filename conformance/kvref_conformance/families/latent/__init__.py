"""The family `latent`: a cache with one row per token, which all heads share."""

from typing import Annotated, Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES, OF_SAVED_CACHES
from kvref_conformance.implementation_api import Attended, Saved
from kvref_conformance.oracle.formats import PACKED_FORMAT, PLAIN_FORMATS, SCALED_FORMATS, group_of
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

TILE = 128  # numbers of a latent that share a scale


def fits(config: Any) -> bool:
    """Returns whether the rank is a multiple of the tile if packed, or else rank and rope_dim are multiples of the group."""
    group = group_of(config["dtype"])
    rope = config["rope_dim"] if config["dtype"] != PACKED_FORMAT else 0
    return bool(config["rank"] % (TILE if config["dtype"] == PACKED_FORMAT else group) == 0 and rope % group == 0)


FAMILY = Family(
    name="latent",
    chapter="latents",
    small={"rank": 6, "rope_dim": 4, "max_tokens": 20, "dtype": "float32"},
    speaks_for=(
        *(law for law in OF_CACHES if law != "LAW-11"),
        "MLA-02",
        "MLA-03",
        "MLA-04",
        "MLA-05",
        "MLA-06",
        "EDIT-01",
        "EDIT-02",
        *OF_SAVED_CACHES,
    ),
    gives={"save": "data"},
    formats={"dtype": (*PLAIN_FORMATS, PACKED_FORMAT, *SCALED_FORMATS)},
    fits=fits,
    token_axis=-2,
    appending={"append": ("latent", "rope")},
)


# The typed protocol of the latent cache.

Latents = Annotated[Array, "[n, rank]"]
Ropes = Annotated[Array, "[n, rope_dim]"]
Rows = Annotated[Array, "[length, rank + rope_dim]"]
Records = Annotated[Array, "uint8 [length, bytes per row]"]
Queries = Annotated[Array, "[num_queries, num_query_heads, nope_dim + rope_dim]"]
UpKeys = Annotated[Array, "[num_query_heads, nope_dim, rank]"]
UpValues = Annotated[Array, "[num_query_heads, value_dim, rank]"]

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": "ShapeMismatch DtypeMismatch NonFinite CapacityExceeded",
    "load": "FileDamaged ConfigError CapacityExceeded",
    "truncate": "PositionOutOfRange",
    "attend": "ShapeMismatch DtypeMismatch",
}


class Latent(Protocol):
    """`dtype` is any format, or `packed`. `records` returns the rows byte by byte. With `causal`, the queries of `attend` are
    those of the last tokens; without, each sees every token.
    """

    length: int
    num_bytes: int

    def append(self, latent: Latents, rope: Ropes) -> None: ...
    def read(self) -> Rows: ...
    def records(self) -> Records: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def save(self) -> Saved: ...
    def load(self, data: Saved) -> None: ...
    def attend(self, query: Queries, up_keys: UpKeys, up_values: UpValues, scale: float, causal: bool) -> Attended: ...


class LatentFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self, *, rank: int, rope_dim: int, max_tokens: int, dtype: str) -> Latent: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    rank, rope_dim = sizes.config.get("rank", 6), sizes.config.get("rope_dim", 4)
    up, query = counting_rows(sizes.heads, sizes.dim, rank), counting_rows(1, sizes.heads, sizes.dim + rope_dim)
    return {
        **on_family("latent", {
            "append": args(latent=counting_rows(2, rank), rope=counting_rows(2, rope_dim)), "length": args(), "num_bytes": args(),
            "read": args(),
            "attend": args(query=query, up_keys=up, up_values=up, scale=1.0, causal=True), "truncate": args(length=1),
            "records": args(), "save": args(),
            "load": args(data=lambda got: got["latent.save"]), "clear": args(),
        }),
    }  # fmt: skip
