"""One call of each operation, for the self-test of a harness."""

import numpy as np

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    lanes = rows(1, sizes.heads, 2, sizes.dim)
    return {
        **owned("kernels", {
            "scatter": of(store=rows(4, sizes.heads, sizes.dim), slots=np.array([1, -1]), new=tokens),
            "gather": of(store=rows(4, sizes.heads, sizes.dim), slots=np.array([3, 0])),
            "copy": of(
                store=rows(4, sizes.heads, sizes.dim), sources=np.array([1]), targets=np.array([0]), block_size=2
            ),
            "update": of(buffer=rows(1, sizes.heads, 4, sizes.dim), new=lanes, position=1),
        }),
    }  # fmt: skip
