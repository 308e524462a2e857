"""The family `recurrent`: its record, its operations and one sample call of each."""

from typing import Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Tokens
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="recurrent",
    chapter="recurrent",
    small={"num_kv_heads": 2, "head_dim": 5, "max_tokens": 40},
    speaks_for=(*(law for law in OF_CACHES if law != "LAW-11"), *(f"RECURRENT-{n:02}" for n in range(1, 4))),
    appending={"append": ("keys", "values")},
)

# The errors that the specification requires of each operation. The factory raises ConfigError.
ERRORS: dict[str, str] = {
    "append": "ShapeMismatch DtypeMismatch NonFinite CapacityExceeded",
}


class Recurrent(Protocol):
    """The operations of a cache. An implementation may lack some."""

    length: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def clear(self) -> None: ...


class RecurrentFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(self, *, num_kv_heads: int, head_dim: int, max_tokens: int) -> Recurrent: ...


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    calls = {"append": args(keys=tokens, values=tokens), "length": args(), "read": args(), "clear": args()}
    return on_family("recurrent", calls)
