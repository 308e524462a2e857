"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    query = rows(2, sizes.heads, sizes.dim)
    return {
        **owned("windowed", {
            "append": of(keys=tokens, values=tokens), "step": of(query=query, keys=tokens, values=tokens, scale=1.0),
            "length": of(), "stored_tokens": of(), "read": of(positions=[1]), "attend": of(query=query, scale=1.0),
            "truncate": of(length=1), "save": of(),
            "load": of(data=lambda got: got["windowed.save"]), "clear": of(),
        }),
    }  # fmt: skip
