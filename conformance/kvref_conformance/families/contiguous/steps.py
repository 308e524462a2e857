"""One call of each operation, for the self-test of a harness."""

import numpy as np

from kvref_conformance.checking.steps import Sizes, Steps, of, owned, rows


def steps(sizes: Sizes) -> Steps:
    lanes = rows(1, sizes.heads, 2, sizes.dim)
    return {
        **owned("contiguous", {
            "append": of(keys=lanes, values=lanes), "append_fused": of(key_values=np.stack([lanes, lanes])), "seq_len": of(),
            "capacity": of(), "read": of(), "raw": of(), "advance": of(count=0),
            "truncate": of(length=1), "reorder": of(rows=[0]), "reset": of(),
        }),
    }  # fmt: skip
