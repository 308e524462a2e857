"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    return {
        **owned("pooled", {
            "append": of(keys=tokens, values=tokens), "total_tokens": of(), "read": of(), "stats": of(), "clear": of(),
        }),
    }  # fmt: skip
