"""Each group has a scale of its own, but all of them are computed from the whole row."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        if not format.startswith("int") or "_g" not in format:
            return super().quantize(rows, format)
        super().quantize(rows, format)  # raises if the rows must be rejected
        bits, group = int(format[3]), int(format.split("_g")[1].split("_")[0])
        wide = np.asarray(rows, np.float32)
        largest = np.abs(wide).max(axis=1)
        ends = np.copy(wide).reshape(len(wide), -1, group)
        ends[:, :, 0] = largest[:, None]  # put the largest number of the row into every group
        _, scale, _ = super().quantize(ends.reshape(wide.shape), format)
        worth = largest / np.float32(2 ** (bits - 1) - 1)
        codes = (
            np.round(wide / np.maximum(worth, 1e-30)[:, None]).clip(-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1).astype(np.int16)
        )
        return kvref.formats.packing.pack((codes & (2**bits - 1)).astype(np.uint8), bits), scale, None


class Implementation(Right):
    clause = "FMT-GROUP-01"
    also = (
        "FMT-GROUP-02",
        "FMT-GROUP-05",
        "FMT-GROUP-06",
        "FMT-LEVEL-01",
        "FMT-LEVEL-02",
        "FMT-LEVEL-03",
    )
    bug = "JustVugg/colibri#225"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
