"""Each operation once."""

from kvref_conformance.checking.steps import HEADS, Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    tokens = rows(2, HEADS, dim)
    return {
        **owned("pooled", {
            "append": of(keys=tokens, values=tokens), "total_tokens": of(), "read": of(), "stats": of(), "clear": of(),
        }),
    }  # fmt: skip
