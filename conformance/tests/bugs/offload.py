"""Bugs in moving blocks to the host and back."""

import random
import time
from contextlib import nullcontext

import numpy as np

from bugs.plant import bug, hidden, in_source, real
from kvref.errors import KeyNotFound
from kvref.host_store import HostBlocks, HostStore
from kvref.token_store import SlotStore

STORE = "kvref.host_store.HostStore"
BLOCKS = "kvref.host_store.HostBlocks"


@bug("MOVE-06")
def what_is_half_stored_is_found(patch):
    in_source(patch, f"{STORE}._is_ready", " and self._blocks[key].ready", "")


@bug("MOVE-06")
def keys_behind_a_hole_are_counted(patch):
    def lookup(self, keys):
        return sum(map(self._is_ready, keys))

    patch.setattr(HostStore, "lookup", lookup)


@bug("MOVE-06")
def what_is_half_stored_is_loaded(patch):
    in_source(patch, f"{STORE}.prepare_load", 'not self._known("prepare_load", key).ready', "key not in self._blocks")


@bug("MOVE-08")
def keys_are_completed_until_one_is_not_being_stored(patch):
    complete_store = HostStore.complete_store

    def one_by_one(self, keys, success=True):
        for key in keys:
            complete_store(self, [key], success)

    patch.setattr(HostStore, "complete_store", one_by_one)


@bug("MOVE-06")
def looking_is_a_use(patch):
    lookup = HostStore.lookup

    def using(self, keys):
        self.touch(keys)
        return lookup(self, keys)

    patch.setattr(HostStore, "lookup", using)


@bug("MOVE-08")
def a_store_that_failed_is_a_hit(patch):
    in_source(patch, f"{STORE}.complete_store", "if success:", "if True:")


@bug("MOVE-08")
def a_store_that_failed_keeps_its_room(patch):
    in_source(patch, f"{STORE}.complete_store", "self._forget(key)", "del self._blocks[key]")


@bug("MOVE-08")
def a_failure_takes_what_was_there(patch):
    in_source(
        patch,
        f"{STORE}.complete_store",
        'if self._known("complete_store", key).ready:',
        "if success and self._blocks[key].ready:",
    )


@bug("MOVE-08")
def one_failure_ends_every_store(patch):
    in_source(
        patch, f"{STORE}.complete_store", "for key in dict.fromkeys(keys):",
        "for key in keys if success else [key for key, block in self._blocks.items() if not block.ready]:",
    )  # fmt: skip


@bug("MOVE-09", "MOVE-13")
def what_is_being_loaded_is_evicted(patch):
    in_source(patch, f"{STORE}._to_evict", " and not block.loads", "")


@bug("MOVE-09")
def what_is_being_stored_is_evicted(patch):
    in_source(patch, f"{STORE}._to_evict", "block.ready and ", "")


@bug("MOVE-09")
def the_first_load_that_ends_ends_all(patch):
    in_source(patch, f"{STORE}.complete_load", ".loads -= 1", ".loads = 0", ".loads < count", ".loads < 0")


@bug("MOVE-09")
def a_key_that_is_named_twice_is_over_once(patch):
    in_source(patch, f"{STORE}.complete_load", "for key in keys:", "for key in dict.fromkeys(keys):")


@bug("MOVE-09")
def a_load_is_given_back_twice(patch):
    in_source(patch, f"{STORE}.complete_load", ".loads < count", ".loads < -9")


@bug("MOVE-09", "LAW-01")
def a_load_that_is_over_keeps_its_block(patch):
    prepare = HostStore.prepare_load

    def early(self, keys):
        for key in keys:
            if key in self._blocks and not self._is_ready(keys[-1]):
                self._blocks[key].loads += 1
        prepare(self, keys)

    patch.setattr(HostStore, "prepare_load", early)
    in_source(patch, f"{STORE}.complete_load", ".loads -= 1", ".loads -= self._blocks[key].loads > 1")


@bug("LAW-01")
def a_load_that_is_refused_keeps_some(patch):
    def one_by_one(self, keys):
        for key in keys:
            if not self._is_ready(key):
                raise KeyNotFound(str(key))
            self._blocks[key].loads += 1
        self._use(keys)

    patch.setattr(HostStore, "prepare_load", one_by_one)


@bug("MOVE-10")
def what_is_there_is_stored_again(patch):
    in_source(patch, f"{STORE}.prepare_store", "if key not in self._blocks]", "if not self._is_ready(key)]")


@bug("MOVE-10")
def a_key_named_twice_takes_two_places(patch):
    in_source(patch, f"{STORE}.prepare_store", "in dict.fromkeys(keys) if", "in keys if")


@bug("MOVE-10")
def room_is_made_for_what_is_there(patch):
    in_source(patch, f"{STORE}.prepare_store", "self._to_evict(len(new) - ", "self._to_evict(len(keys) - ")


@bug("MOVE-10")
def what_goes_is_not_said(patch):
    in_source(patch, f"{STORE}.prepare_store", "return new, evicted", "return new, evicted[1:]")


@bug("MOVE-10")
def what_the_call_names_is_evicted(patch):
    in_source(patch, f"{STORE}._to_evict", "set(kept)", "set()")


@bug("MOVE-10")
def a_part_goes_for_what_has_no_room(patch):
    evict = HostStore._to_evict

    def hasty(self, count, kept):
        try:
            return evict(self, count, kept)
        except Exception:
            for key in evict(self, min(1, sum(block.ready for block in self._blocks.values())), ()):
                self._forget(key)
            raise

    patch.setattr(HostStore, "_to_evict", hasty)


@bug("MOVE-10")
def two_keys_have_one_place(patch):
    in_source(patch, f"{STORE}.prepare_store", "_Block(self._free.pop())", "_Block(self._free.pop() // 2)")


@bug("MOVE-10")
def an_evicted_block_keeps_its_room(patch):
    in_source(patch, f"{STORE}._forget", "self._free.append(", "(self._free.append if not self._blocks[key].ready else id)(")


@bug("MOVE-11")
def what_was_stored_first_goes_first(patch):
    in_source(patch, f"{STORE}._use", "block.used = ", "block.used = block.used or ")


@bug("MOVE-11")
def what_was_used_last_goes_first(patch):
    in_source(patch, f"{STORE}._to_evict", "heappop(self._uses)", "self._uses.pop(self._uses.index(max(self._uses)))")


@bug("MOVE-11")
def the_beginning_of_a_prefix_goes_first(patch):
    in_source(patch, f"{STORE}._use", "reversed(keys)", "keys")


@bug("MOVE-11")
def a_load_is_no_use(patch):
    in_source(patch, f"{STORE}.prepare_load", "self._use(keys)", "pass")


@bug("MOVE-12")
def what_goes_is_numbers_of_16_bits(patch):
    def to_host(self, blocks, places):
        device, host = self._slots(blocks, places)
        self.sent = getattr(self, "sent", {})
        with np.errstate(over="ignore"):
            parts = [part.astype(np.float16).astype(np.float32) for part in self._store.read(device)]
        self.sent |= {slot: [part[at] for part in parts] for at, slot in enumerate(host.tolist())}

    def to_device(self, places, blocks):
        device, host = self._slots(blocks, places)
        there = [(slot, self.sent[place]) for slot, place in zip(device, host.tolist(), strict=True) if place in self.sent]
        if there:
            slots, parts = zip(*there, strict=True)
            self._store.write(list(slots), *map(np.stack, zip(*parts, strict=True)))

    patch.setattr(HostBlocks, "to_host", to_host)
    patch.setattr(HostBlocks, "to_device", to_device)


@bug("MOVE-12")
def scales_stay_behind(patch):
    in_source(patch, f"{BLOCKS}.to_host", "if room is not None:", "if room is not None and part.ndim > 2:")


@bug("MOVE-12")
def values_are_copied_as_keys(patch):
    in_source(patch, f"{BLOCKS}.to_host", "(self._store.keys, self._store.values)", "(self._store.keys, self._store.keys)")


@bug("MOVE-12")
def the_last_token_of_a_block_is_left_out(patch):
    in_source(patch, f"{BLOCKS}._slots", "np.arange(self.block_size)", "np.arange(max(1, self.block_size - 1))")


@bug("MOVE-12")
def places_are_filled_in_their_order(patch):
    in_source(patch, f"{BLOCKS}.to_host", "room[host]", "room[np.sort(host)]")


@bug("MOVE-12")
def a_copy_is_a_view_of_its_source(patch):
    patch.setattr(HostBlocks, "to_host", lambda self, blocks, places: _look(self, blocks, places))
    to_device = HostBlocks.to_device

    def late(self, places, blocks):
        self._slots(blocks, places)
        for place, block in zip(places, blocks, strict=True):
            source = getattr(self, "sources", {}).get(place)
            if source is not None:
                self._store.copy([source], [block], self.block_size)
            else:
                to_device(self, [place], [block])

    patch.setattr(HostBlocks, "to_device", late)


def _look(self, blocks, places):
    """Remember the block of each place instead of copying it."""
    self._slots(blocks, places)
    self.sources = {**getattr(self, "sources", {}), **dict(zip(places, blocks, strict=True))}


@bug("MOVE-12")
def a_negative_block_is_skipped(patch):
    in_source(
        patch, f"{BLOCKS}._slots", "slots_to_gather(each, end, self._backend.to_numpy)", "np.asarray(each, np.int64)"
    )  # fmt: skip


@bug("MOVE-13")
def the_books_are_kept_without_a_lock(patch):
    prepare, evict = HostStore.__init__, HostStore._to_evict

    def unlocked(self, capacity):
        prepare(self, capacity)
        self._lock = nullcontext()

    def in_its_own_time(self, *args):
        time.sleep(random.uniform(0, 1e-4))  # so that the race occurs on a busy machine too
        return evict(self, *args)

    patch.setattr(HostStore, "__init__", unlocked)
    patch.setattr(HostStore, "_to_evict", in_its_own_time)


# Bugs that show only after certain calls, or at production sizes.


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


@bug("LAW-17")
def places_are_returned_in_the_list_of_the_last_call(patch):
    places, returned = HostStore.places, []

    def reused(self, keys):
        returned[:] = places(self, keys)
        return returned

    patch.setattr(HostStore, "places", reused)
