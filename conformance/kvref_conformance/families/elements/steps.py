"""One call of each operation, for the self-test of a harness."""

import numpy as np

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    return {
        **owned("elements", {
            "encode": of(values=rows(sizes.dim), format=sizes.format),
            "decode": of(codes=np.zeros(sizes.dim, np.uint8), format=sizes.format)
        }),
    }  # fmt: skip
