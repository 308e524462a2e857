"""One call of each operation."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(sizes.made.get("block_size", 1), sizes.heads, sizes.dim)
    return owned("hosted", {
        "write": of(block=0, keys=tokens, values=tokens), "to_host": of(blocks=[0], places=[0]),
        "to_device": of(places=[0], blocks=[0]), "read": of(block=0),
    })  # fmt: skip
