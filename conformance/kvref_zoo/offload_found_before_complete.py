"""A key is a hit as soon as its store begins: who loads it meanwhile reads what lay there before."""

import kvref
from kvref.offload import Key, Keys
from kvref_zoo.right import Right


class Store(kvref.HostStore):
    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        new, evicted = super().prepare_store(keys)
        super().complete_store(new)
        return new, evicted

    def complete_store(self, keys: Keys, success: bool = True) -> None:
        """It is there already."""


class Implementation(Right):
    clause = "MOVE-06"
    also = ("MOVE-08", "MOVE-09", "MOVE-10")  # what fails stays, and what is on its way may go
    bug = "vllm-project/vllm#35092"

    def offload(self, capacity: int) -> Store:
        return Store(capacity)
