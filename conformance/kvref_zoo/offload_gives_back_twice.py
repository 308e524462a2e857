"""Completing one load twice removes two pins. The second pin belongs to another request that is still loading the block."""

import kvref
from kvref.offload import Keys
from kvref_zoo.right import Right


class Store(kvref.HostStore):
    def complete_load(self, keys: Keys) -> None:
        for key in keys:
            if key in self._blocks:
                self._blocks[key].loads -= 1


class Implementation(Right):
    clause = "MOVE-09"
    bug = "LMCache/LMCache#5095"
    also = ("LAW-19", "LAW-01")

    def offload(self, capacity: int) -> Store:
        return Store(capacity)
