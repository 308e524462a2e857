"""One call of each operation."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    query = rows(1, sizes.heads, sizes.dim)
    return {
        **owned("tiered", {
            "append": of(keys=tokens, values=tokens), "total_tokens": of(), "read": of(), "tier_of": of(position=0),
            "stats": of(), "attend": of(query=query, scale=1.0), "update_policy": of(tail_length=2),
            "truncate": of(length=1), "save": of(),
            "load": of(data=lambda got: got["tiered.save"]), "clear": of(),
        }),
    }  # fmt: skip
