"""Wrong host stores."""

from typing import Any

import kvref
from kvref.host_store import Key, Keys
from kvref_zoo.mutant import mutant


@mutant("MOVE-09", also="MOVE-13", seen_in="sgl-project/sglang#31427")
class OffloadEvictsLoadingBlocks(kvref.HostStore):
    """The least recently used block is evicted even if it is pinned by a load: its place is overwritten during the copy."""

    def _to_evict(self, count: int, kept: Keys) -> list[Any]:
        loads = {key: block.loads for key, block in self._blocks.items()}
        for block in self._blocks.values():
            block.loads = 0
        try:
            return super()._to_evict(count, kept)
        finally:
            for key, block in self._blocks.items():
                block.loads = loads[key]


@mutant("MOVE-08", also="MOVE-10 MOVE-11", seen_in="sgl-project/sglang#27108")
class OffloadFailedStoreIsAHit(kvref.HostStore):
    """A copy to the host that failed is treated as complete, and later lookups find it."""

    def complete_store(self, keys: Keys, success: bool = True) -> None:
        super().complete_store(keys)


# also: failed stores stay, and blocks that are being stored can be evicted
@mutant("MOVE-06", also="MOVE-08 MOVE-09 MOVE-10 MOVE-11", seen_in="vllm-project/vllm#35092")
class OffloadFoundBeforeComplete(kvref.HostStore):
    """A key is found as soon as its store begins: a load before the store is complete reads the former contents of the place."""

    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        new, evicted = super().prepare_store(keys)
        super().complete_store(new)
        return new, evicted

    def complete_store(self, keys: Keys, success: bool = True) -> None:
        """Does nothing: the keys are stored already."""


@mutant("MOVE-09", also="LAW-01 LAW-19 MOVE-11", seen_in="LMCache/LMCache#5095")
class OffloadLoadCompletesTwice(kvref.HostStore):
    """Completing one load twice removes two pins. The second pin belongs to another request that is still loading the block."""

    def complete_load(self, keys: Keys) -> None:
        for key in keys:
            if key in self._blocks:
                self._blocks[key].loads -= 1
                self._add_use(key)


@mutant("MOVE-10", also="LAW-01 MOVE-06 MOVE-08 MOVE-09 MOVE-11 MOVE-13", seen_in="vllm-project/vllm#53532")
class OffloadStoresStoredKeysAgain(kvref.HostStore):
    """A key that is already stored is stored again in a new place: its former contents and the former place are lost."""

    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        lost = {key: self._blocks.pop(key) for key in keys if key in self._blocks}
        try:
            return super().prepare_store(keys)
        except Exception:
            self._blocks.update(lost)
            raise
