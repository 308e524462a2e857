"""The slot -1 of a padding token is counted from the end: the last token of the store is overwritten."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Kernels(kvref.ReferenceBackend):
    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        return super().scatter(store, np.where(slots < 0, slots % len(store), slots), new)


class Implementation(Right):
    clause = "KERN-02"
    also = ("KERN-08",)
    bug = "huggingface/transformers#46765"

    def kernels(self) -> Kernels:
        return Kernels()
