"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    return {
        **owned("buffers", {
            "acquire": of(num_bytes=4 * sizes.dim), "prewarm": of(size=1024, count=1), "stats": of(), "clear": of(),
        }),
        **owned("buffer", {
            "size": of(), "capacity": of(), "length": of(), "address": of(), "extend": of(values=rows(sizes.dim)), "values": of(),
            "clear": of(), "release": of(),
        }),
    }  # fmt: skip
