"""The family `ragged`: its record, its operations and one sample call of each."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Lanes
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

NewRows = Annotated[Array, "[rows, num_kv_heads, n, head_dim]"]
RowTokens = Annotated[Array, "[num_kv_heads, n, head_dim]"]
Queries = Annotated[Array, "[batch_size, num_query_heads, num_queries, head_dim]"]

FAMILY = Family(
    name="ragged",
    chapter="ragged",
    small={"batch_size": 3, "num_kv_heads": 2, "head_dim": 5, "max_tokens": 40},
    speaks_for=(*OF_CACHES, *(f"RAGGED-{n:02}" for n in range(1, 11))),
    token_axis=-2,
    appending={"append": ("keys", "values")},
)

# The errors that the specification requires of each operation. The factory raises ConfigError.
_TOKENS = "ShapeMismatch DtypeMismatch NonFinite PositionOutOfRange CapacityExceeded"
ERRORS: dict[str, str] = {
    "length": "RowOutOfRange",
    "append": _TOKENS,
    "extend": _TOKENS,
    "filter": "RowOutOfRange",
    "trim": "ShapeMismatch PositionOutOfRange",
    "read": "RowOutOfRange",
    "attend": "ShapeMismatch DtypeMismatch",
}


class Ragged(Protocol):
    """The operations of a cache. An implementation may lack some. `batch_size` is the present number of rows."""

    batch_size: int

    def length(self, row: int) -> int: ...
    def append(self, keys: Lanes, values: Lanes, counts: Sequence[int] | None = None, left: bool = False) -> None: ...
    def extend(self, keys: NewRows, values: NewRows, counts: Sequence[int] | None = None, left: bool = False) -> None: ...
    def filter(self, rows: Sequence[int]) -> None: ...
    def trim(self, counts: Sequence[int]) -> None: ...
    def read(self, row: int) -> tuple[RowTokens, RowTokens]: ...
    def attend(self, query: Queries, scale: float | None = None, causal: bool = False) -> Queries: ...


class RaggedFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(self, *, batch_size: int, num_kv_heads: int, head_dim: int, max_tokens: int) -> Ragged: ...


def sample_calls(sizes: Sizes) -> SampleCalls:
    batch = sizes.config.get("batch_size", 2)
    tokens = counting_rows(batch, sizes.heads, 2, sizes.dim)
    calls = {
        "append": args(keys=tokens, values=tokens), "length": args(row=0),
        "extend": args(keys=tokens[:1], values=tokens[:1]), "batch_size": args(),
        "filter": args(rows=list(range(1, batch + 1))), "read": args(row=batch - 1), "attend": args(query=tokens[:, :, :1]),
        "trim": args(counts=[1] * batch),
    }  # fmt: skip
    return on_family("ragged", calls)
