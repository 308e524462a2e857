"""A slot past the end is detected only when it is reached: the tokens before it are already written."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Kernels(kvref.ReferenceBackend):
    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        if len(slots) == len(new):
            for slot, token in zip(slots, new, strict=True):
                store = super().scatter(store, np.array([slot]), token[None])
            return store
        return super().scatter(store, slots, new)


class Implementation(Right):
    clause = "KERN-03"
    also = ("KERN-08",)
    bug = "flashinfer-ai/flashinfer#3647"

    def kernels(self) -> Kernels:
        return Kernels()
