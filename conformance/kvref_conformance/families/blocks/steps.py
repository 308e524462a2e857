"""One call of each operation, for the self-test of a harness."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned


def steps(sizes: Sizes) -> Steps:
    return {
        **owned("blocks", {
            "num_blocks": of(), "num_free": of(), "num_used": of(), "utilization": of(), "allocate": of(),
            "allocate_many": of(count=1), "share": of(block=lambda got: got["blocks.allocate"]),
            "references": of(block=0), "free": of(block=lambda got: got["blocks.allocate"]),
        }),
    }  # fmt: skip
