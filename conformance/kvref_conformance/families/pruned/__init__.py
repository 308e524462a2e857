"""The family `pruned`: its record, its operations and one sample call of each."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Query, Tokens
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

Scores = Annotated[Array, "[num_kv_heads, stored_tokens]"]

FAMILY = Family(
    name="pruned",
    chapter="pruned",
    small={"num_kv_heads": 2, "head_dim": 5, "max_tokens": 40},
    speaks_for=(*(law for law in OF_CACHES if law != "LAW-11"), *(f"PRUNED-{n:02}" for n in range(1, 10) if n != 5)),
    appending={"append": ("keys", "values")},
)

# The errors that the specification requires of each operation. The factory raises ConfigError.
ERRORS: dict[str, str] = {
    "append": "ShapeMismatch DtypeMismatch NonFinite CapacityExceeded",
    "prune": "ShapeMismatch DtypeMismatch NonFinite PositionOutOfRange",
    "truncate": "PositionOutOfRange NotTruncatable",
    "positions": "HeadOutOfRange",
    "attend": "ShapeMismatch DtypeMismatch",
}


class Pruned(Protocol):
    """The operations of a cache. An implementation may lack some."""

    length: int
    stored_tokens: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def prune(self, scores: Scores, keep: int, sinks: int = 0, recent: int = 0) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def positions(self, head: int) -> Sequence[int] | Array: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def attend(self, query: Query, scale: float | None = None, causal: bool = False) -> Query: ...


class PrunedFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(self, *, num_kv_heads: int, head_dim: int, max_tokens: int) -> Pruned: ...


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    scores = counting_rows(2, sizes.heads, 1)[:, :, 0].T.copy()
    calls = {
        "append": args(keys=tokens, values=tokens), "length": args(), "prune": args(scores=scores, keep=1),
        "stored_tokens": args(), "read": args(), "positions": args(head=0), "attend": args(query=tokens[:1]),
        "truncate": args(length=1), "clear": args(),
    }  # fmt: skip
    return on_family("pruned", calls)
