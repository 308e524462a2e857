"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    rank, rope_dim = sizes.made.get("rank", 6), sizes.made.get("rope_dim", 4)
    up, query = rows(sizes.heads, sizes.dim, rank), rows(1, sizes.heads, sizes.dim + rope_dim)
    return {
        **owned("latent", {
            "append": of(latent=rows(2, rank), rope=rows(2, rope_dim)), "length": of(), "num_bytes": of(), "read": of(),
            "attend": of(query=query, up_keys=up, up_values=up, scale=1.0, causal=True), "truncate": of(length=1),
            "records": of(), "save": of(),
            "load": of(data=lambda got: got["latent.save"]), "clear": of(),
        }),
    }  # fmt: skip
