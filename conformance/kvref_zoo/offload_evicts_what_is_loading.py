"""The least recently used block is evicted even if it is pinned by a load: its place is overwritten during the copy."""

from typing import Any

import kvref
from kvref.offload import Keys
from kvref_zoo.right import Right


class Store(kvref.HostStore):
    def _to_evict(self, count: int, kept: Keys) -> list[Any]:
        loads = {key: block.loads for key, block in self._blocks.items()}
        for block in self._blocks.values():
            block.loads = 0
        try:
            return super()._to_evict(count, kept)
        finally:
            for key, block in self._blocks.items():
                block.loads = loads[key]


class Implementation(Right):
    clause = "MOVE-09"
    also = ("MOVE-13",)
    bug = "sgl-project/sglang#31427"

    def offload(self, capacity: int) -> Store:
        return Store(capacity)
