"""Each operation once."""

import numpy as np

from kvref_conformance.checking.steps import Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    return {
        **owned("elements", {
            "encode": of(values=rows(dim), format=format), "decode": of(codes=np.zeros(dim, np.uint8), format=format)
        }),
    }  # fmt: skip
