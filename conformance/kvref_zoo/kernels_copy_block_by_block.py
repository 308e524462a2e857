"""Blocks are copied in order: a block that is the target of one copy and the source of the next passes on its new contents."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Kernels(kvref.ReferenceBackend):
    def copy(self, store: Any, sources: Any, targets: Any, block_size: int = 1) -> Any:
        if len(sources) != len(targets):
            return super().copy(store, sources, targets, block_size)
        for number in range(len(sources)):
            one = slice(number, number + 1)
            store = super().copy(store, sources[one], targets[one], block_size)
        return store


class Implementation(Right):
    clause = "KERN-09"

    def kernels(self) -> Kernels:
        return Kernels()
