"""The zero point of a group is clipped to the range of the codes: if all numbers of a group have one sign, they are clipped."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        if not format.startswith("uint"):
            return super().quantize(rows, format)
        super().quantize(rows, format)  # raises if the rows must be rejected
        group = int(format.split("_g")[1].split("_")[0])
        groups = np.asarray(rows, np.float32).reshape(len(rows), -1, group)
        span = groups.max(axis=2, keepdims=True) - groups.min(axis=2, keepdims=True)
        return super().quantize(np.clip(groups, -span, span).reshape(rows.shape), format)


class Implementation(Right):
    clause = "FMT-GROUP-01"
    also = (
        "FMT-GROUP-02",
        "FMT-GROUP-05",
        "FMT-LEVEL-01",
        "FMT-LEVEL-02",
        "FMT-LEVEL-03",
    )
    bug = "keras-team/keras#23636"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
