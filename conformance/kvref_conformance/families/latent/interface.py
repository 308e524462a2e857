"""The typed protocol of the latent cache."""

from typing import Annotated, Protocol

from kvref.array import Array
from kvref_conformance.interface import Attended, Saved

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
    """`dtype` is any format, or `packed`. `records` returns the rows byte by byte."""

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


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self, *, rank: int, rope_dim: int, max_tokens: int, dtype: str) -> Latent: ...
