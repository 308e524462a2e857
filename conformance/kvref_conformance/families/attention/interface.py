"""The typed protocol of attention functions."""

from typing import Protocol

from kvref_conformance.interface import Attended, HeadNumbers, Query, Tokens, Values

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "attention": "ShapeMismatch DtypeMismatch",
    "window_attention": "ShapeMismatch DtypeMismatch",
    "sink_attention": "ShapeMismatch DtypeMismatch",
}


class Attention(Protocol):
    """Attention is over the first `length` tokens. The queries of `window_attention` are those of the last tokens.

    `chunk` is 0 for no chunks. `logit_sink` is a score per query head of a token without a value, or minus infinity for none.
    """

    def attention(
        self, query: Query, keys: Tokens, values: Values, *, scale: float, causal: bool, length: int
    ) -> Attended: ...  # fmt: skip
    def window_attention(
        self, query: Query, keys: Tokens, values: Values, *, scale: float, window: int, sinks: int, chunk: int
    ) -> Attended: ...
    def sink_attention(
        self, query: Query, keys: Tokens, values: Values, *, scale: float, causal: bool, logit_sink: HeadNumbers
    ) -> Attended: ...


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self) -> Attention: ...
