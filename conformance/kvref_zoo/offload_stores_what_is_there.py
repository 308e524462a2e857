"""A key that is already stored is stored again in a new place: its former contents and the former place are lost."""

import kvref
from kvref.offload import Key, Keys
from kvref_zoo.right import Right


class Store(kvref.HostStore):
    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        lost = {key: self._blocks.pop(key) for key in keys if key in self._blocks}
        try:
            return super().prepare_store(keys)
        except Exception:
            self._blocks.update(lost)
            raise


class Implementation(Right):
    clause = "MOVE-10"
    also = ("MOVE-06", "MOVE-08", "MOVE-09", "MOVE-11", "MOVE-13", "LAW-01")
    bug = "vllm-project/vllm#53532"

    def offload(self, capacity: int) -> Store:
        return Store(capacity)
