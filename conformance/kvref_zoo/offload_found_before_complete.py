"""A key is found as soon as its store begins: a load before the store is complete reads the former contents of the place."""

import kvref
from kvref.offload import Key, Keys
from kvref_zoo.right import Right


class Store(kvref.HostStore):
    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        new, evicted = super().prepare_store(keys)
        super().complete_store(new)
        return new, evicted

    def complete_store(self, keys: Keys, success: bool = True) -> None:
        """Does nothing: the keys are stored already."""


class Implementation(Right):
    clause = "MOVE-06"
    also = ("MOVE-08", "MOVE-09", "MOVE-10")  # failed stores stay, and blocks that are being stored can be evicted
    bug = "vllm-project/vllm#35092"

    def offload(self, capacity: int) -> Store:
        return Store(capacity)
