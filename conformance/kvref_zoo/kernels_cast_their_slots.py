"""Slots are cast to integers without a check: 1.9 becomes slot 1, and a boolean mask of tokens becomes slots 0 and 1."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Kernels(kvref.ReferenceBackend):
    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        return super().scatter(store, np.asarray(slots, np.int64), new)

    def gather(self, store: Any, slots: Any, out: Any = None) -> Any:
        return super().gather(store, np.asarray(slots, np.int64), out)


class Implementation(Right):
    clause = "KERN-08"

    def kernels(self) -> Kernels:
        return Kernels()
