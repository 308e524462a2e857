"""Each operation once."""

import numpy as np

from kvref_conformance.checking.steps import HEADS, Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    tokens = rows(2, HEADS, dim)
    lanes = rows(1, HEADS, 2, dim)
    return {
        **owned("kernels", {
            "scatter": of(store=rows(4, HEADS, dim), slots=np.array([1, -1]), new=tokens),
            "gather": of(store=rows(4, HEADS, dim), slots=np.array([3, 0])),
            "update": of(buffer=rows(1, HEADS, 4, dim), new=lanes, position=1),
        }),
    }  # fmt: skip
