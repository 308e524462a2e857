"""One call of each operation."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens, query = rows(2, sizes.heads, sizes.dim), rows(1, sizes.heads, sizes.dim)
    last = sizes.made.get("head_ranks", 1) * sizes.made.get("token_ranks", 1) - 1
    return {
        **owned("sharded", {
            "append": of(keys=tokens, values=tokens), "length": of(), "read": of(), "read_rank": of(rank=0),
            "heads": of(rank=last), "positions": of(rank=0), "block_table": of(rank=last), "num_bytes": of(rank=0),
            "attend": of(query=query, scale=1.0), "truncate": of(length=1), "clear": of(), "lose_in_append": of(rank=last),
            "lose": of(rank=0),
        }),
    }  # fmt: skip
