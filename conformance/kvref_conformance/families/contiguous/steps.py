"""Each operation once."""

import numpy as np

from kvref_conformance.checking.steps import HEADS, Steps, of, owned, rows


def steps(dim: int, format: str) -> Steps:
    lanes = rows(1, HEADS, 2, dim)
    return {
        **owned("contiguous", {
            "append": of(keys=lanes, values=lanes), "append_fused": of(key_values=np.stack([lanes, lanes])), "seq_len": of(),
            "capacity": of(), "read": of(), "raw": of(), "advance": of(count=0), "reset": of(),
        }),
    }  # fmt: skip
