"""Attention over tokens that are handed in."""

from typing import Protocol

from kvref_conformance.interface import Attended, Query, Tokens, Values

# The errors that each operation may have to answer with; what `new` has to refuse is always a ConfigError.
ERRORS: dict[str, str] = {
    "attention": "ShapeMismatch DtypeMismatch",
}


class Attention(Protocol):
    """The first `length` tokens count."""

    def attention(
        self, query: Query, keys: Tokens, values: Values, *, scale: float, causal: bool, length: int
    ) -> Attended: ...  # fmt: skip


class Factory(Protocol):
    """What makes one: it is given every size by name."""

    def __call__(self) -> Attention: ...
