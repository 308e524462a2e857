"""Wrong copies of blocks to host memory."""

from typing import Any

from kvref_conformance.implementations.backends import Hosted
from kvref_zoo.mutant import mutant


@mutant("MOVE-12", also="LAW-04", seen_in="kekzl/imp#1189")
class HostedScalesAreNotCopied(Hosted):
    """Codes are copied to the host and back without their scales.

    A block is read with the scales of the block that was there before.
    """

    def to_device(self, places: Any, blocks: Any) -> None:
        scales = [
            (store, store.stored([slot for block in blocks if 0 <= block < self._num_blocks for slot in self._slots(block)]))
            for store in (self._store.keys, self._store.values)
        ]
        super().to_device(places, blocks)
        slots = [slot for block in blocks for slot in self._slots(block)]
        for store, before in scales:
            if before.scale is not None:
                store.put(slots, before._replace(codes=store.stored(slots).codes))
