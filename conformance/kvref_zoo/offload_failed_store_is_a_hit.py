"""A copy to the host that failed is treated as complete, and later lookups find it."""

import kvref
from kvref.offload import Keys
from kvref_zoo.right import Right


class Store(kvref.HostStore):
    def complete_store(self, keys: Keys, success: bool = True) -> None:
        super().complete_store(keys)


class Implementation(Right):
    clause = "MOVE-08"
    also = ("MOVE-10",)
    bug = "sgl-project/sglang#27108"

    def offload(self, capacity: int) -> Store:
        return Store(capacity)
