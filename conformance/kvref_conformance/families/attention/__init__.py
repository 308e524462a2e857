"""The family `attention`: attention functions without a cache."""

from typing import Protocol

from kvref_conformance.families import Family
from kvref_conformance.implementation_api import Attended, HeadNumbers, Query, Tokens, Values
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="attention",
    chapter="attention",
)


# The typed protocol of attention functions.

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


class AttentionFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self) -> Attention: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    query = counting_rows(1, sizes.heads, sizes.dim)
    return {
        **on_family("attention", {
            "attention": args(query=query, keys=tokens, values=tokens, scale=1.0, causal=False, length=2),
            "window_attention": args(query=query, keys=tokens, values=tokens, scale=1.0, window=1, sinks=0, chunk=0),
            "sink_attention": args(query=query, keys=tokens, values=tokens, scale=1.0, causal=False,
            logit_sink=counting_rows(sizes.heads)),
        }),
    }  # fmt: skip
