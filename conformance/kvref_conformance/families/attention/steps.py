"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    query = rows(1, sizes.heads, sizes.dim)
    return {
        **owned("attention", {
            "attention": of(query=query, keys=tokens, values=tokens, scale=1.0, causal=False, length=2),
            "window_attention": of(query=query, keys=tokens, values=tokens, scale=1.0, window=1, sinks=0, chunk=0),
            "sink_attention": of(query=query, keys=tokens, values=tokens, scale=1.0, causal=False, logit_sink=rows(sizes.heads)),
        }),
    }  # fmt: skip
