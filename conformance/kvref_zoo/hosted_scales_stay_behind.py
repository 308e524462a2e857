"""Codes are copied to the host and back without their scales.

A block is read with the scales of the block that was there before.
"""

from typing import Any

from kvref.backend import reference
from kvref_conformance.implementations.backends import Hosted
from kvref_zoo.right import Right


class Blocks(Hosted):
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


class Implementation(Right):
    clause = "MOVE-12"
    also = ("LAW-04",)
    bug = "kekzl/imp#1189"

    def hosted(self, **config: Any) -> Blocks:
        return Blocks(reference, **config)
