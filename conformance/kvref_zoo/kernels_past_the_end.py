"""A slot past the end is noticed only when it is reached: the rows before it are written already."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Kernels(kvref.ReferenceBackend):
    def scatter(self, store: Any, slots: Any, rows: Any) -> Any:
        if len(slots) == len(rows):
            for slot, row in zip(slots, rows, strict=True):
                store = super().scatter(store, np.array([slot]), row[None])
            return store
        return super().scatter(store, slots, rows)


class Implementation(Right):
    clause = "KERN-03"
    bug = "flashinfer-ai/flashinfer#3647"

    def kernels(self) -> Kernels:
        return Kernels()
