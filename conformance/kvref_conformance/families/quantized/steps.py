"""Each operation once."""

from kvref_conformance.checking.steps import HEADS, Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    tokens = rows(2, HEADS, dim)
    query = rows(1, HEADS, dim)
    return {
        **owned("quantized", {
            "append": of(layer=0, keys=tokens, values=tokens), "append_step": of(keys=tokens, values=tokens),
            "length": of(layer=0), "read_head": of(layer=0, position=0, head=1), "read_token": of(layer=0, position=0),
            "read_tokens": of(layer=0, positions=[1, 0]), "memory_bytes": of(), "fp32_bytes": of(), "compression_ratio": of(),
            "attend": of(layer=0, query=query, scale=1.0), "clear": of(),
        }),
    }  # fmt: skip
