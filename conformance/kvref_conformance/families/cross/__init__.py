"""The family `cross`: its record, its operations and one sample call of each."""

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
    name="cross",
    chapter="cross",
    small={"batch_size": 3, "num_kv_heads": 2, "head_dim": 5, "max_tokens": 40, "max_source": 30},
    speaks_for=(*OF_CACHES, *(f"CROSS-{n:02}" for n in range(1, 10))),
    token_axis=-2,
    appending={"append": ("keys", "values")},
)

# The errors that the specification requires of each operation. The factory raises ConfigError.
_TOKENS = "ShapeMismatch DtypeMismatch NonFinite PositionOutOfRange CapacityExceeded"
ERRORS: dict[str, str] = {
    "write_source": f"RowOutOfRange {_TOKENS} SourceAlreadyWritten",
    "source_length": "RowOutOfRange SourceNotWritten",
    "read_source": "RowOutOfRange SourceNotWritten",
    "attend_source": "ShapeMismatch DtypeMismatch SourceNotWritten",
    "append": _TOKENS,
    "trim": "ShapeMismatch PositionOutOfRange",
    "length": "RowOutOfRange",
    "read": "RowOutOfRange",
    "filter": "RowOutOfRange",
    "clear": "RowOutOfRange",
}


class Cross(Protocol):
    """The operations of a cache. An implementation may lack some. `batch_size` is the present number of rows."""

    batch_size: int

    def write_source(self, rows: Sequence[int], keys: NewRows, values: NewRows, counts: Sequence[int] | None = None) -> None: ...
    def source_length(self, row: int) -> int: ...
    def read_source(self, row: int) -> tuple[RowTokens, RowTokens]: ...
    def attend_source(self, query: Queries, scale: float | None = None) -> Queries: ...
    def append(self, keys: Lanes, values: Lanes, counts: Sequence[int] | None = None) -> None: ...
    def trim(self, counts: Sequence[int]) -> None: ...
    def length(self, row: int) -> int: ...
    def read(self, row: int) -> tuple[RowTokens, RowTokens]: ...
    def filter(self, rows: Sequence[int]) -> None: ...
    def clear(self, row: int) -> None: ...


class CrossFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(self, *, batch_size: int, num_kv_heads: int, head_dim: int, max_tokens: int, max_source: int) -> Cross: ...


def sample_calls(sizes: Sizes) -> SampleCalls:
    batch = sizes.config.get("batch_size", 2)
    tokens = counting_rows(batch, sizes.heads, 2, sizes.dim)
    calls = {
        "write_source": args(rows=list(range(batch)), keys=tokens, values=tokens), "source_length": args(row=0),
        "read_source": args(row=batch - 1), "attend_source": args(query=tokens[:, :, :1]),
        "append": args(keys=tokens, values=tokens), "length": args(row=0), "read": args(row=batch - 1),
        "trim": args(counts=[1] * batch), "filter": args(rows=list(range(batch))), "batch_size": args(), "clear": args(row=0),
    }  # fmt: skip
    return on_family("cross", calls)
