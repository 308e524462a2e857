"""Bugs in moving blocks to the host and back that show only after certain calls, or at production sizes."""

import numpy as np

from bugs.plant import hidden, in_source, real
from kvref.host_store import HostBlocks, HostStore
from kvref.token_store import SlotStore

STORE = "kvref.host_store.HostStore"


@hidden("offload", "MOVE-09")
def what_is_loaded_twice_is_kept_once(patch):
    in_source(patch, f"{STORE}.prepare_load", ".loads += 1", ".loads = 1")
    in_source(patch, f"{STORE}.complete_load", ".loads < count", ".loads < 0")


@hidden("offload", "MOVE-10")
def what_failed_is_taken_for_being_stored(patch):
    complete = HostStore.complete_store

    def remembering(self, keys, success=True):
        complete(self, keys, success)
        self.failed = getattr(self, "failed", set()) | (set() if success else set(keys))

    patch.setattr(HostStore, "complete_store", remembering)
    in_source(
        patch,
        f"{STORE}.prepare_store",
        "if key not in self._blocks]",
        "if key not in self._blocks and key not in getattr(self, 'failed', ())]",
    )


@hidden("hosted", "MOVE-12")
def a_place_is_filled_once(patch):
    to_host = HostBlocks.to_host

    def once(self, blocks, places):
        self._slots(blocks, places)
        self.filled = getattr(self, "filled", set())
        new = [(block, place) for block, place in zip(blocks, places, strict=True) if place not in self.filled]
        to_host(self, *map(list, zip(*new, strict=True)) if new else ([], []))
        self.filled |= set(places)

    patch.setattr(HostBlocks, "to_host", once)


@real("hosted")
def slots_are_counted_in_bytes(patch):
    put = SlotStore.put

    def short(self, slots, new):
        if len(slots) > 1000:
            slots = np.asarray(slots) % 1024
        put(self, slots, new)

    patch.setattr(SlotStore, "put", short)


@real("offload")
def only_so_many_keys_are_counted(patch):
    lookup = HostStore.lookup
    patch.setattr(HostStore, "lookup", lambda self, keys: min(lookup(self, keys), 64))
