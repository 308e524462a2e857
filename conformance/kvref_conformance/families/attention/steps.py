"""Each operation once."""

from kvref_conformance.checking.steps import HEADS, Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    tokens = rows(2, HEADS, dim)
    query = rows(1, HEADS, dim)
    return {
        **owned("attention", {
            "attention": of(query=query, keys=tokens, values=tokens, scale=1.0, causal=False, length=2),
        }),
    }  # fmt: skip
