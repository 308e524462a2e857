"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    dim = sizes.made.get("head_dim", 32)
    tokens, query = rows(2, sizes.heads, dim), rows(1, sizes.heads, dim)
    return {
        **owned("channels", {
            "append": of(keys=tokens, values=tokens), "length": of(), "quantized_keys": of(), "quantized_values": of(),
            "memory_bytes": of(), "read": of(positions=[1, 0]), "attend": of(query=query, scale=1.0), "truncate": of(length=1),
            "clear": of(),
        }),
    }  # fmt: skip
