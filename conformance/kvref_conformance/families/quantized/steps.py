"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    step = rows(sizes.layers, sizes.heads, sizes.dim)
    query = rows(1, sizes.heads, sizes.dim)
    return {
        **owned("quantized", {
            "append": of(layer=0, keys=tokens, values=tokens), "append_step": of(keys=step, values=step),
            "length": of(layer=0), "read_head": of(layer=0, position=0, head=sizes.heads - 1),
            "read_token": of(layer=0, position=0),
            "read_tokens": of(layer=0, positions=[1, 0]), "memory_bytes": of(), "fp32_bytes": of(), "compression_ratio": of(),
            "attend": of(layer=0, query=query, scale=1.0), "save": of(),
            "load": of(data=lambda got: got["quantized.save"]), "truncate": of(length=1), "clear": of(),
        }),
    }  # fmt: skip
