"""Tokens pass through floating-point arithmetic when they are written: the payloads of NaNs are lost."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Kernels(kvref.ReferenceBackend):
    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        store = super().scatter(store, slots, new)
        if store.dtype == np.float32:
            store[np.isnan(store)] = np.float32(np.nan)
        return store


class Implementation(Right):
    clause = "KERN-04"
    also = ("KERN-01",)

    def kernels(self) -> Kernels:
        return Kernels()
